from collections.abc import AsyncIterator

import pytest

from service_kit.ids import GenerationId, new_generation_id
from sluice.local.valkey import LocalValkey
from tests.support.delta_logs import LogUnderTest, memory_log, valkey_log


@pytest.fixture(params=["memory", "valkey"])
async def log_under_test(request: pytest.FixtureRequest) -> AsyncIterator[LogUnderTest]:
    if request.param == "memory":
        yield memory_log()
        return
    server: LocalValkey = request.getfixturevalue("valkey_server")
    async with valkey_log(server.url) as under_test:
        yield under_test


@pytest.fixture
def generation_id() -> GenerationId:
    return new_generation_id()
