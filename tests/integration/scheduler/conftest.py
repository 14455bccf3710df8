"""Schedulers over memory twins and over real Postgres and Valkey, with a scripted worker."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime

import pytest
import pytest_asyncio

from scheduler.queue.memory import MemoryAdmissionQueue
from scheduler.queue.redis_queue import RedisAdmissionQueue
from sluice.local.valkey import LocalValkey
from state_store.delta_log.connection import connect_redis
from state_store.delta_log.memory import MemoryDeltaLog
from state_store.delta_log.redis_log import RedisDeltaLog
from state_store.memory.store import MemoryStore
from state_store.postgres.store import PostgresStore
from tests.support.polling import eventually
from tests.support.scheduler_rig import ManualClock, SchedulerRig, Stores, running_scheduler
from tests.support.scripted_worker import ScriptedWorker

SCHEDULER_DATABASE = 7


def _now() -> datetime:
    return datetime.now(tz=UTC)


@asynccontextmanager
async def _open_real_stores(dsn: str, url: str) -> AsyncIterator[Stores]:
    store = PostgresStore(dsn)
    await store.open()
    redis = connect_redis(f"{url.rsplit('/', 1)[0]}/{SCHEDULER_DATABASE}")
    await redis.flushdb()
    try:
        yield Stores(store=store, log=RedisDeltaLog(redis), queue=RedisAdmissionQueue(redis), redis=redis)
    finally:
        await redis.aclose()
        await store.close()


@pytest_asyncio.fixture
async def real_stores(make_store_dsn: Callable[[], str], valkey_server: LocalValkey) -> AsyncIterator[Stores]:
    """An empty Postgres database and an empty Valkey."""
    async with _open_real_stores(make_store_dsn(), valkey_server.url) as stores:
        yield stores


@pytest_asyncio.fixture(params=["memory", "real"])
async def stores(request: pytest.FixtureRequest) -> AsyncIterator[Stores]:
    """The twins, and the real servers; the queue goes by the scheduler's clock."""
    if request.param == "memory":
        clock = ManualClock()
        queue = MemoryAdmissionQueue(clock.now)
        yield Stores(store=MemoryStore(), log=MemoryDeltaLog(_now), queue=queue, redis=None, clock=clock)
        return
    dsn = request.getfixturevalue("make_store_dsn")()
    async with _open_real_stores(dsn, request.getfixturevalue("valkey_server").url) as stores:
        assert stores.redis is not None
        stores.queue = RedisAdmissionQueue(stores.redis, clock=stores.clock.now)
        yield stores


@pytest_asyncio.fixture
async def rig(stores: Stores) -> AsyncIterator[SchedulerRig]:
    async with running_scheduler(stores, clock=stores.clock) as rig:
        yield rig


@pytest_asyncio.fixture
async def worker(rig: SchedulerRig) -> AsyncIterator[ScriptedWorker]:
    """Announced, greeted, and with room."""
    async with AsyncExitStack() as stack:
        worker = ScriptedWorker()
        await worker.start()
        stack.push_async_callback(worker.stop)
        await worker.announce(rig.address)
        await eventually(lambda: bool(rig.parts.registry.ready()))
        yield worker
