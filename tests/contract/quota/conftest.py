"""Quotas as the memory twin and real Valkey count them."""

from collections.abc import AsyncIterator

import pytest

from sluice.local.valkey import LocalValkey
from tests.support.clock import SteppedClock
from tests.support.quotas import (
    START,
    QuotaUnderTest,
    memory_quota,
    valkey_quota,
)


@pytest.fixture(params=["memory", "valkey"])
async def emptied(request: pytest.FixtureRequest) -> AsyncIterator[QuotaUnderTest]:
    clock = SteppedClock(START)
    if request.param == "memory":
        yield memory_quota(clock)
        return
    server: LocalValkey = request.getfixturevalue("valkey_server")
    async with valkey_quota(server.url, clock) as under_test:
        yield under_test


@pytest.fixture
async def under_test(emptied: QuotaUnderTest) -> QuotaUnderTest:
    await emptied.make_ready()
    return emptied
