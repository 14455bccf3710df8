from collections.abc import AsyncIterator

import pytest

from service_kit.ids import GenerationId, new_generation_id
from sluice.local.valkey import LocalValkey
from tests.support.admission_queues import QueueUnderTest, memory_queue, server_queue
from tests.support.delta_logs import LogUnderTest, memory_log, valkey_log
from tests.support.redis_server import RedisServer


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


@pytest.fixture(params=["memory", "valkey", "redis"])
async def emptied(request: pytest.FixtureRequest) -> AsyncIterator[QueueUnderTest]:
    """An admission queue without its marker."""
    if request.param == "memory":
        yield memory_queue()
        return
    server: LocalValkey | RedisServer = request.getfixturevalue(f"{request.param}_server")
    async with server_queue(server.url) as under_test:
        yield under_test


@pytest.fixture
async def under_test(emptied: QueueUnderTest) -> QueueUnderTest:
    await emptied.queue.mark_ready()
    return emptied
