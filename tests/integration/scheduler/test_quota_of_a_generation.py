"""What the scheduler does about a reservation: bound by the commit, given back by an attach, settled by the end."""

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import pytest_asyncio

from scheduler.queue.memory import MemoryAdmissionQueue
from service_kit.delta import Cursor, make_delta
from service_kit.errors import AlreadyExistsError, UnavailableError
from service_kit.ids import KeyId
from state_store.delta_log.memory import MemoryDeltaLog
from state_store.memory.store import MemoryStore
from state_store.model import CancelCause, NewGeneration, State
from state_store.quota.memory import MemoryQuota
from state_store.quota.port import QuotaCharge, QuotaKind, QuotaScope, QuotaStanding
from state_store.tenants import QuotaLimits
from tests.support.polling import eventually
from tests.support.quotas import subject_of
from tests.support.scheduler_rig import TENANT, SchedulerRig, Stores, make_generation, running_scheduler
from tests.support.scripted_worker import ScriptedWorker

KEY = KeyId("key-a")
MANY = QuotaLimits(requests_per_minute=10_000, max_concurrent=10_000, tokens_per_day=10_000_000)
SUBJECT = subject_of(tenant_id=TENANT, key_id=KEY, tenant=MANY)


@dataclass(kw_only=True)
class QuotaRig:
    """A scheduler with quotas, as a gateway meets it."""

    scheduler: SchedulerRig
    quota: MemoryQuota
    worker: ScriptedWorker

    async def submit(self, **fields: Any) -> NewGeneration:
        """Reserved and submitted: 3 prompt tokens, at most 100 of output."""
        generation = make_generation(**fields)
        await self.reserve(generation)
        await self.scheduler.submit(generation)
        return generation

    async def reserve(self, generation: NewGeneration) -> None:
        charge = QuotaCharge(
            generation_id=generation.generation_id,
            tenant_id=TENANT,
            key_id=KEY,
            prompt_tokens=3,
            max_output_tokens=100,
        )
        await self.quota.reserve(charge, SUBJECT)

    async def used(self) -> list[int]:
        """Requests, live ones, tokens of the day."""
        standing: list[QuotaStanding] = await self.quota.look(SUBJECT)
        assert {each.scope for each in standing} == {QuotaScope.TENANT}
        used = {each.kind: each.limit - each.remaining for each in standing}
        return [
            used[kind] for kind in (QuotaKind.REQUESTS_PER_MINUTE, QuotaKind.MAX_CONCURRENT, QuotaKind.TOKENS_PER_DAY)
        ]

    async def cancel(self, generation: NewGeneration) -> None:
        await self.scheduler.parts.cancellation.request([(generation.generation_id, CancelCause.CLIENT)])

    async def granted(self) -> NewGeneration:
        generation = await self.submit()
        assert await self.scheduler.dispatch()
        await self.worker.until(lambda: bool(self.worker.assignments()))
        return generation

    def say_end(self, generation: NewGeneration) -> None:
        """Two tokens, and that they are all."""
        delta = make_delta(after=Cursor(), token_ids=[5, 6], texts=["a", "b"])
        self.worker.say(generation.generation_id, 1, delta, finish_reason="STOP", output_tokens=2)


def _now() -> datetime:
    return datetime.now(tz=UTC)


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[QuotaRig]:
    quota = MemoryQuota(_now)
    stores = Stores(store=MemoryStore(), log=MemoryDeltaLog(_now), queue=MemoryAdmissionQueue(_now), redis=None)
    async with AsyncExitStack() as stack:
        scheduler = await stack.enter_async_context(running_scheduler(stores, quota=quota))
        assert scheduler.parts.quota_reaper is not None
        await scheduler.parts.quota_reaper.run_once()
        worker = ScriptedWorker()
        await worker.start()
        stack.push_async_callback(worker.stop)
        await worker.announce(scheduler.address)
        await eventually(lambda: bool(scheduler.parts.registry.ready()))
        yield QuotaRig(scheduler=scheduler, quota=quota, worker=worker)


async def test_the_commit_binds_and_the_end_counts_what_was_used(rig: QuotaRig) -> None:
    generation = await rig.granted()
    assert rig.quota._data.reservations[generation.generation_id].is_bound
    assert await rig.used() == [1, 1, 103]
    rig.say_end(generation)
    await rig.worker.until(lambda: bool(rig.worker.ended()))
    assert await rig.used() == [1, 0, 5]


async def test_attaching_and_conflicting_requests_give_their_reservations_back(rig: QuotaRig) -> None:
    await rig.submit(request_id="mine")
    await rig.submit(request_id="mine")
    with pytest.raises(AlreadyExistsError):
        await rig.submit(request_id="mine", request_hash=b"x" * 32)
    assert await rig.used() == [1, 1, 103]


async def test_a_row_whose_scheduler_died_behind_the_commit_keeps_the_reservation(rig: QuotaRig) -> None:
    generation = make_generation()
    await rig.reserve(generation)
    await rig.scheduler.stores.store.submit_many([generation])
    await rig.scheduler.submit(generation)  # the gateway asks the next scheduler
    assert rig.quota._data.reservations[generation.generation_id].is_bound
    assert await rig.used() == [1, 1, 103]


async def test_a_row_that_nobody_has_bound_is_counted_when_the_reaper_queues_it(rig: QuotaRig) -> None:
    generation = make_generation()  # as a requeue of a dead letter makes it, or what the gateway gave up and released
    await rig.scheduler.stores.store.submit_many([generation], now=_now() - timedelta(seconds=3))
    assert await rig.used() == [0, 0, 0]
    await rig.scheduler.parts.reaper.run_once()
    assert await rig.used() == [1, 1, 103]
    await rig.cancel(generation)
    assert await rig.used() == [1, 0, 3]


async def test_a_request_cancelled_in_the_queue_counts_its_prompt(rig: QuotaRig) -> None:
    generation = await rig.submit()
    await rig.cancel(generation)
    assert (await rig.scheduler.record(generation.generation_id)).state is State.CANCELLED
    assert await rig.used() == [1, 0, 3]


async def test_no_end_waits_for_lost_counts_and_none_is_missing_in_the_rebuilt_ones(rig: QuotaRig) -> None:
    generation, queued = await rig.granted(), await rig.submit()
    rig.quota.lose_all()
    rig.say_end(generation)
    await rig.worker.until(lambda: bool(rig.worker.ended()))
    assert (await rig.scheduler.record(generation.generation_id)).state is State.SUCCEEDED
    (view,) = await rig.scheduler.stores.log.read_many([(generation.generation_id, 0)])
    assert view.terminal is not None
    with pytest.raises(UnavailableError):
        await rig.used()
    assert rig.scheduler.parts.quota_reaper is not None
    await rig.scheduler.parts.quota_reaper.run_once()
    assert await rig.used() == [2, 1, 5 + 103]
    await rig.cancel(queued)
    assert await rig.used() == [2, 0, 5 + 3]


async def test_after_many_submits_attaches_conflicts_and_cancels_the_reservations_are_the_live_generations(
    rig: QuotaRig,
) -> None:
    draw, known = random.Random(8), list[NewGeneration]()
    for number in range(400):
        match draw.choice(["submit", "submit", "attach", "conflict", "cancel"]):
            case "attach" if known:
                await rig.submit(request_id=draw.choice(known).request_id)
            case "conflict" if known:
                with pytest.raises(AlreadyExistsError):
                    await rig.submit(request_id=draw.choice(known).request_id, request_hash=bytes(32))
            case "cancel" if known:
                await rig.cancel(draw.choice(known))
            case _:
                known.append(await rig.submit(request_id=f"request-{number}"))
    records = await rig.scheduler.stores.store.get_many([each.generation_id for each in known])
    live = {record.generation_id for record in records if record is not None and not record.state.is_terminal}
    assert set(rig.quota._data.reservations) == live
    assert await rig.used() == [len(known), len(live), 103 * len(live) + 3 * (len(known) - len(live))]
    for generation in known:
        await rig.cancel(generation)
    assert not rig.quota.has_reservations()
