"""What a worker says of itself, as its scheduler keeps and uses it: room per class, cached prefixes; and the salt it gets."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import pytest
import pytest_asyncio

from inference.internal.v1 import worker_pb2
from scheduler.queue.memory import MemoryAdmissionQueue
from scheduler.worker_session import WorkerSession
from service_kit.ids import TenantId
from state_store.delta_log.memory import MemoryDeltaLog
from state_store.memory.store import MemoryStore
from state_store.model import PriorityClass
from tests.support.polling import eventually
from tests.support.scheduler_rig import SchedulerRig, Stores, make_generation, running_scheduler
from tests.support.scripted_worker import ScriptedWorker


def _now() -> datetime:
    return datetime.now(tz=UTC)


@asynccontextmanager
async def _served(*, shares_prefixes: bool = False) -> AsyncIterator[tuple[SchedulerRig, ScriptedWorker]]:
    stores = Stores(store=MemoryStore(), log=MemoryDeltaLog(_now), queue=MemoryAdmissionQueue(_now), redis=None)
    async with running_scheduler(stores, shares_prefixes=shares_prefixes) as rig:
        worker = ScriptedWorker()
        worker.cached_prefixes = [1, 2]
        await worker.start()
        try:
            await worker.announce(rig.address)
            await eventually(lambda: bool(rig.parts.registry.ready()))
            yield rig, worker
        finally:
            await worker.stop()


@pytest_asyncio.fixture
async def served() -> AsyncIterator[tuple[SchedulerRig, ScriptedWorker]]:
    async with _served() as both:
        yield both


def session_of(rig: SchedulerRig) -> WorkerSession:
    return rig.parts.registry.ready()[0]


def report(*room_blocks: int) -> worker_pb2.LoadReport:
    return worker_pb2.LoadReport(
        num_blocks=1000, block_size=16, num_free_blocks=room_blocks[-1], room_blocks=room_blocks
    )


async def test_the_prefixes_of_hello_and_heartbeats_are_known_until_a_new_hello(
    served: tuple[SchedulerRig, ScriptedWorker],
) -> None:
    rig, worker = served
    prefixes = session_of(rig).cached_prefixes
    assert prefixes.num_cached_blocks([1, 2, 3]) == 2
    worker.heartbeat(added=[3, 4], removed=[2])
    await eventually(lambda: prefixes.num_cached_blocks([1, 3, 4]) == 3)
    assert prefixes.num_cached_blocks([1, 2]) == 1
    worker.cached_prefixes = [9]
    session = session_of(rig)
    assert session._stream is not None
    session._stream._is_overrun.set()  # the connection breaks; the session comes back on a new stream
    await eventually(lambda: prefixes.num_cached_blocks([9]) == 1)
    assert len(prefixes) == 1


async def test_a_class_gets_what_the_report_says_for_it_and_no_other(
    served: tuple[SchedulerRig, ScriptedWorker],
) -> None:
    rig, worker = served
    worker.load = report(10, 1, 1)
    worker.heartbeat()
    await eventually(lambda: session_of(rig).load.room_blocks == (10, 1, 1))
    prompt = tuple(range(40))
    await rig.submit(make_generation(prompt_token_ids=prompt, priority_class=PriorityClass.BATCH))
    assert not await rig.dispatch()
    urgent = await rig.submit(make_generation(prompt_token_ids=prompt, priority_class=PriorityClass.INTERACTIVE))
    assert await rig.dispatch()
    await worker.until(lambda: [each.generation_id for each in worker.assignments()] == [urgent.generation_id])
    assert not await rig.dispatch()


async def test_what_was_dispatched_counts_until_a_load_report_shows_it(
    served: tuple[SchedulerRig, ScriptedWorker],
) -> None:
    rig, worker = served
    worker.load = report(3, 3, 3)
    worker.heartbeat()
    await eventually(lambda: session_of(rig).load.room_blocks == (3, 3, 3))
    prompt = tuple(range(30))
    first = await rig.submit(make_generation(prompt_token_ids=prompt))
    assert await rig.dispatch()
    await rig.submit(make_generation(prompt_token_ids=prompt))
    assert not await rig.dispatch()
    worker.hold(first.generation_id, 1, position=0)
    worker.heartbeat()
    attempt = session_of(rig).table.all()[0]
    await eventually(lambda: attempt.is_seen)
    assert not await rig.dispatch(), "it is named, but the report beside it is older"
    worker.load = report(3, 3, 3)
    worker.load.num_waiting = 1
    worker.heartbeat()
    await eventually(lambda: session_of(rig).load.num_waiting == 1)
    assert await rig.dispatch()


async def test_a_report_that_makes_no_sense_ends_the_session(served: tuple[SchedulerRig, ScriptedWorker]) -> None:
    rig, worker = served
    worker.load = worker_pb2.LoadReport(room_blocks=[1, 2])
    worker.heartbeat()
    await eventually(lambda: len(rig.parts.registry) == 0)


@pytest.mark.parametrize(("shares_prefixes", "salts"), [(False, {"tenant-a", "tenant-b"}), (True, {""})])
async def test_tenants_get_salts_of_their_own_unless_they_share(shares_prefixes: bool, salts: set[str]) -> None:
    async with _served(shares_prefixes=shares_prefixes) as (rig, worker):
        for tenant in ("tenant-a", "tenant-b"):
            await rig.submit(make_generation(tenant_id=TenantId(tenant)))
        assert await rig.dispatch()
        await worker.until(lambda: len(worker.assignments()) == 2)
        assert {each.prefix_salt for each in worker.assignments()} == salts
