from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from scheduler.queue.memory import MemoryAdmissionQueue
from service_kit.ids import GatewayId
from state_store.delta_log.memory import MemoryDeltaLog
from state_store.memory.store import MemoryStore
from state_store.model import CancelCause, State
from state_store.ports import LostSession
from tests.support.scheduler_rig import ManualClock, Stores, make_generation, running_scheduler

LEASE_S = 5.0


def _now() -> datetime:
    return datetime.now(tz=UTC)


async def test_a_queue_that_goes_away_between_two_rounds_does_not_end_the_reaper() -> None:
    queue = MemoryAdmissionQueue(_now)
    stores = Stores(store=MemoryStore(), log=MemoryDeltaLog(_now), queue=queue, redis=None)
    async with running_scheduler(stores) as rig:
        await rig.parts.reaper.run_once()
        queue.is_reachable = False
        await rig.parts.reaper.run_once()
        queue.is_reachable = True
        queue.lose_all()
        await rig.parts.reaper.run_once()
        assert await queue.is_ready()


class SlowStore(MemoryStore):
    """Answers one call after a while, and notes whether sessions were to be lost."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.slow_call = ""
        self.num_losses = 0
        self._passing = clock

    def _answer(self, call: str) -> None:
        if call == self.slow_call:
            self._passing.advance(2.0)

    async def list_sessions(self, *, include_over: bool = False) -> Any:
        self._answer("list_sessions")
        return await super().list_sessions(include_over=include_over)

    async def orphans(self, *, limit: int) -> Any:
        self._answer("orphans")
        return await super().orphans(limit=limit)

    async def lose_expired(self, *, limit: int, now: datetime | None = None) -> list[LostSession]:
        self.num_losses += 1
        return await super().lose_expired(limit=limit, now=now)


@pytest.mark.parametrize("slow_call", ["list_sessions", "orphans"])
async def test_a_store_that_stood_still_counts_as_away_and_no_session_is_lost_for_a_whole_lease(slow_call: str) -> None:
    clock = ManualClock()
    store = SlowStore(clock)
    stores = Stores(store=store, log=MemoryDeltaLog(_now), queue=MemoryAdmissionQueue(_now), redis=None)
    async with running_scheduler(stores, clock=clock) as rig:
        await rig.parts.reaper.run_once()
        clock.advance(LEASE_S)
        await rig.parts.reaper.run_once()
        assert store.num_losses == 1, "it has been readable for a lease"
        store.slow_call = slow_call
        await rig.parts.reaper.run_once()
        after_standstill = store.num_losses
        store.slow_call = ""
        for _ in range(4):
            await rig.parts.reaper.run_once()
            clock.advance(1.0)
        assert store.num_losses == after_standstill == (1 if slow_call == "list_sessions" else 2)
        clock.advance(1.0)
        await rig.parts.reaper.run_once()
        assert store.num_losses == after_standstill + 1


class PassingClock(ManualClock):
    """A moment passes between any two looks at it."""

    def now(self) -> datetime:
        self.advance(0.001)
        return ManualClock.now(self)


async def test_what_is_being_read_is_not_cancelled_however_short_its_grace() -> None:
    clock = PassingClock()
    log = MemoryDeltaLog(clock.now)
    stores = Stores(store=MemoryStore(), log=log, queue=MemoryAdmissionQueue(clock.now), redis=None)
    async with running_scheduler(stores, clock=clock) as rig:
        record = await rig.submit(make_generation(grace=timedelta(0)))
        await log.attach_many(GatewayId("gateway-a"), [(record.generation_id, 0)])
        await rig.parts.reaper.run_once()
        clock.advance(10)
        await rig.parts.reaper.run_once()
        assert (await rig.record(record.generation_id)).state is State.QUEUED
        await log.unwatch_many(GatewayId("gateway-a"), [record.generation_id])
        clock.advance(1)
        await rig.parts.reaper.run_once()
        assert (await rig.record(record.generation_id)).cancel_cause is CancelCause.GRACE


async def test_a_call_that_is_still_being_submitted_has_time_to_watch_however_short_its_grace() -> None:
    clock = PassingClock(started=_now() - timedelta(seconds=20))
    log = MemoryDeltaLog(clock.now)
    stores = Stores(store=MemoryStore(), log=log, queue=MemoryAdmissionQueue(clock.now), redis=None)
    async with running_scheduler(stores, clock=clock) as rig:
        await rig.parts.reaper.run_once()
        clock.advance(20)  # to when ids are drawn; watching is known by then
        read, unread = [await rig.submit(make_generation(grace=timedelta(0))) for _ in range(2)]
        clock.advance(4)
        await rig.parts.reaper.run_once()
        assert (await rig.record(unread.generation_id)).state is State.QUEUED
        await log.attach_many(GatewayId("gateway-a"), [(read.generation_id, 0)])
        clock.advance(2)
        await rig.parts.reaper.run_once()
        assert (await rig.record(read.generation_id)).state is State.QUEUED
        assert (await rig.record(unread.generation_id)).cancel_cause is CancelCause.GRACE
