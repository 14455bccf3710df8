"""The interleavings that the protocol's rules stand for: two schedulers over one real Postgres and Valkey."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest_asyncio
from redis.asyncio import Redis

from inference.internal.v1 import worker_pb2
from scheduler.policy import queue_entry_of
from scheduler.redis_cancel_hints import CHANNEL
from service_kit.delta import Cursor, Delta, make_delta
from state_store.delta_log.port import LogView, SealItem
from state_store.model import AttemptOutcome, CancelCause, State
from state_store.ports import GrantRequest
from tests.support.polling import eventually, eventually_answers
from tests.support.scheduler_rig import SchedulerRig, Stores, running_scheduler
from tests.support.scripted_worker import ScriptedWorker


@dataclass(slots=True, kw_only=True)
class Pair:
    """Two schedulers and a worker that announced itself to the first."""

    first: SchedulerRig
    second: SchedulerRig
    worker: ScriptedWorker
    stores: Stores


@pytest_asyncio.fixture
async def pair(real_stores: Stores) -> AsyncIterator[Pair]:
    async with running_scheduler(real_stores) as first, running_scheduler(real_stores) as second:
        worker = ScriptedWorker()
        await worker.start()
        await worker.announce(first.address)
        await eventually(lambda: bool(first.parts.registry.ready()))
        yield Pair(first=first, second=second, worker=worker, stores=real_stores)
        await worker.stop()


@pytest_asyncio.fixture
async def other_worker(pair: Pair) -> AsyncIterator[ScriptedWorker]:
    """A worker of the second scheduler."""
    worker = ScriptedWorker()
    await worker.start()
    await worker.announce(pair.second.address)
    await eventually(lambda: bool(pair.second.parts.registry.ready()))
    yield worker
    await worker.stop()


def delta(after: Cursor, *token_ids: int) -> Delta:
    return make_delta(after=after, token_ids=token_ids, texts=[f"<{token_id}>" for token_id in token_ids])


async def log_of(pair: Pair, generation_id: str) -> LogView:
    record = await pair.first.record(generation_id)
    return (await pair.stores.log.read_many([(record.generation_id, 0)]))[0]


async def test_a_paused_scheduler_cannot_splice_its_attempt_into_the_next_one(
    pair: Pair, other_worker: ScriptedWorker
) -> None:
    # Attempt 1 runs under the first scheduler and has logged 50 tokens.
    record = await pair.first.submit()
    generation_id = record.generation_id
    assert await pair.first.dispatch()
    await pair.worker.until(lambda: bool(pair.worker.assignments()))
    prefix = delta(Cursor(), *range(1, 51))
    pair.worker.say(generation_id, 1, prefix)
    await pair.worker.until(lambda: bool(pair.worker.received_of("ack")))
    # The first scheduler pauses. The second finds the lease over, requeues, and grants attempt 2 to its own worker.
    lost = await pair.stores.store.lose_session(pair.worker.session_id, 1)
    assert lost is not None
    await pair.second.parts.recovery.recover_session(lost)
    assert await pair.second.dispatch()
    await other_worker.until(lambda: bool(other_worker.assignments()))
    assert list(other_worker.assignments()[0].output_token_ids) == list(range(1, 51))
    # The first one wakes up with tokens 51-53 of attempt 1 in its hands: they must not be taken for attempt 2's.
    pair.worker.say(generation_id, 1, delta(prefix.end, 901, 902, 903))
    await pair.worker.until(lambda: any(v.action == worker_pb2.VERDICT_ACTION_ABORT for v in pair.worker.verdicts()))
    assert pair.first.parts.coordinator.num_stale_appends == 1
    own = delta(prefix.end, 51, 52, 53)
    other_worker.say(generation_id, 2, own)
    other_worker.say(generation_id, 2, delta(own.end, 54), finish_reason="LENGTH", output_tokens=54)
    await other_worker.until(lambda: (generation_id, 2) in other_worker.ended())
    output = (await pair.stores.store.read_output_many([generation_id]))[0]
    assert output is not None
    assert output.token_ids == tuple(range(1, 55))
    assert len(await pair.stores.store.ledger_of(generation_id)) == 1


async def test_a_recovery_that_comes_late_takes_nothing_of_the_next_attempt_for_the_lost_ones(
    pair: Pair, other_worker: ScriptedWorker
) -> None:
    record = await pair.first.submit()
    generation_id = record.generation_id
    assert await pair.first.dispatch()
    await pair.worker.until(lambda: bool(pair.worker.assignments()))
    lost = await pair.stores.store.lose_session(pair.worker.session_id, 1)
    assert lost is not None
    # The log was away, so the recovery waits; when it is back, a reaper queues the row before the recovery goes on.
    await pair.stores.queue.enqueue_many([queue_entry_of(lost.requeued[0], weight=1.0)])
    assert await pair.second.dispatch()
    await other_worker.until(lambda: bool(other_worker.assignments()))
    other_worker.say(generation_id, 2, delta(Cursor(), 1, 2, 3))
    await other_worker.until(lambda: bool(other_worker.received_of("ack")))
    await pair.first.parts.recovery.recover_session(lost)
    first, second = await pair.stores.store.attempts_of(record.generation_id)
    assert (first.attempt, first.outcome, first.is_charged, second.outcome) == (1, None, False, None)
    after = await pair.first.record(generation_id)
    assert (after.state, after.attempt, after.charged_attempts) == (State.RUNNING, 2, 0)


async def test_a_deposed_scheduler_cannot_grant_and_its_entry_goes_back_to_the_queue(pair: Pair) -> None:
    # The scripted worker keeps the first stream open, as one does that has not noticed; the second one takes over.
    await pair.worker.announce(pair.second.address)
    await eventually(lambda: bool(pair.second.parts.registry.ready()))
    record = await pair.first.submit()
    assert pair.first.parts.registry.ready()
    assert not await pair.first.dispatch()
    after = await pair.first.record(record.generation_id)
    assert (after.state, after.attempt) == (State.QUEUED, 0)
    assert await pair.second.dispatch()
    assert (await pair.first.record(record.generation_id)).state is State.RUNNING


async def test_a_deposed_scheduler_hangs_up_at_its_next_renewal_and_loses_nothing(pair: Pair) -> None:
    record = await pair.first.submit()
    assert await pair.first.dispatch()
    await pair.worker.announce(pair.second.address)
    await eventually(lambda: bool(pair.second.parts.registry.ready()))
    await pair.first.parts.registry.renew_once()
    assert not len(pair.first.parts.registry)
    after = await pair.first.record(record.generation_id)
    assert (after.state, after.attempt, after.session_id) == (State.RUNNING, 1, pair.worker.session_id)


async def test_an_attempt_continues_under_the_scheduler_that_takes_its_session_over(pair: Pair) -> None:
    record = await pair.first.submit()
    generation_id = record.generation_id
    assert await pair.first.dispatch()
    await pair.worker.until(lambda: bool(pair.worker.assignments()))
    start = delta(Cursor(), 1, 2)
    pair.worker.say(generation_id, 1, start)
    await pair.worker.until(lambda: bool(pair.worker.received_of("ack")))
    # Tokens 3 and 4 never reached the first scheduler; the worker names its position to the second one.
    pair.worker.hold(generation_id, 1, position=4)
    await pair.worker.announce(pair.second.address)
    await pair.worker.until(lambda: any(v.resend_from == 3 for v in pair.worker.verdicts()))
    pair.worker.say(generation_id, 1, delta(start.end, 3, 4), finish_reason="STOP", output_tokens=4)
    await pair.worker.until(lambda: (generation_id, 1) in pair.worker.ended())
    assert len(pair.worker.assignments()) == 1
    assert (await log_of(pair, generation_id)).end.sequence_number == 4


async def test_an_attempt_that_a_new_owner_finds_unnamed_is_assigned_again_at_once(pair: Pair) -> None:
    record = await pair.first.submit()
    assert await pair.first.dispatch()
    await pair.worker.until(lambda: len(pair.worker.assignments()) == 1)
    await pair.worker.announce(pair.second.address)
    await pair.worker.until(lambda: len(pair.worker.assignments()) == 2)
    assert pair.worker.assignments()[1].attempt == 1
    assert (await pair.first.record(record.generation_id)).attempt == 1


async def test_an_ambiguous_grant_is_found_in_postgres_and_assigned(pair: Pair) -> None:
    """The grant committed, and the scheduler never heard of it."""
    record = await pair.first.submit()
    await pair.stores.store.grant_many(
        [
            GrantRequest(
                generation_id=record.generation_id,
                after_attempt=0,
                session_id=pair.worker.session_id,
                owner_epoch=1,
                nonce=7,
            )
        ]
    )
    await pair.first.parts.registry.compare_once()
    await pair.first.parts.registry.compare_once()
    pair.first.clock.advance(2.1)
    pair.worker.heartbeat()
    await pair.worker.until(lambda: len(pair.worker.assignments()) == 1)
    assert pair.worker.assignments()[0].nonce == 7


async def test_both_schedulers_dispatching_at_once_grant_each_generation_once(
    pair: Pair, other_worker: ScriptedWorker
) -> None:
    records = [await pair.first.submit() for _ in range(20)]
    granted = 1
    while granted:
        granted = int(await pair.first.dispatch()) + int(await pair.second.dispatch())
    await eventually(lambda: len(pair.worker.assignments()) + len(other_worker.assignments()) == 20)
    assigned = [a.generation_id for a in pair.worker.assignments() + other_worker.assignments()]
    assert sorted(assigned) == sorted(record.generation_id for record in records)


async def test_a_paused_scheduler_cannot_open_an_emptied_log_for_an_attempt_that_is_over(
    pair: Pair, other_worker: ScriptedWorker
) -> None:
    record = await pair.first.submit()
    generation_id = record.generation_id
    assert await pair.first.dispatch()
    await pair.worker.until(lambda: bool(pair.worker.assignments()))
    lost = await pair.stores.store.lose_session(pair.worker.session_id, 1)
    assert lost is not None
    await pair.second.parts.recovery.recover_session(lost, outcome=AttemptOutcome.HANDED_BACK)
    assert await pair.second.dispatch()
    await other_worker.until(lambda: bool(other_worker.assignments()))
    await pair.stores.lose_log_and_queue()
    pair.worker.say(generation_id, 1, delta(Cursor(), 901))
    await pair.worker.until(lambda: any(v.action == worker_pb2.VERDICT_ACTION_ABORT for v in pair.worker.verdicts()))
    other_worker.say(generation_id, 2, delta(Cursor(), 1))
    await other_worker.until(lambda: any(v.resend_from == 1 for v in other_worker.verdicts()))
    assert (await log_of(pair, generation_id)).attempt == 2


async def test_a_row_whose_recovery_died_between_seal_and_finish_is_ended_by_the_next_owner_of_its_session(
    pair: Pair,
) -> None:
    # A cancelled attempt was taken back: its log is sealed, the row still says RUNNING on a session that lives.
    record = await pair.first.submit()
    generation_id = record.generation_id
    assert await pair.first.dispatch()
    await pair.worker.until(lambda: bool(pair.worker.assignments()))
    pair.worker.say(generation_id, 1, delta(Cursor(), 1, 2))
    await pair.worker.until(lambda: bool(pair.worker.received_of("ack")))
    await pair.stores.store.request_cancel_many([(generation_id, CancelCause.CLIENT)])
    await pair.stores.log.seal_many([SealItem(generation_id=generation_id, attempt=1)])
    pair.worker.hold(generation_id, 1, position=2)
    await pair.worker.announce(pair.second.address)
    await pair.worker.until(lambda: any(v.action == worker_pb2.VERDICT_ACTION_ABORT for v in pair.worker.verdicts()))
    pair.worker.held = []

    async def is_ended() -> bool:
        pair.second.clock.advance(1)
        pair.worker.heartbeat()
        await pair.second.parts.registry.compare_once()
        return (await pair.second.record(generation_id)).state.is_terminal

    await eventually_answers(is_ended)
    after = await pair.second.record(generation_id)
    assert (after.state, after.output_tokens) == (State.CANCELLED, 2)
    assert not len(pair.second.parts.registry.ready()[0].table)


async def test_a_cancel_through_the_other_scheduler_reaches_the_worker_before_any_comparison(pair: Pair) -> None:
    assert pair.stores.redis is not None
    redis = pair.stores.redis
    await eventually_answers(lambda: _follow_both(redis))
    record = await pair.first.submit()
    assert await pair.first.dispatch()
    await pair.worker.until(lambda: bool(pair.worker.assignments()))
    state = await pair.second.parts.cancellation.cancel(record.tenant_id, record.generation_id)
    assert state is State.RUNNING
    await pair.worker.until(lambda: bool(pair.worker.received_of("cancel")))
    pair.worker.say(record.generation_id, 1, None, finish_reason="CANCELLED")
    await pair.worker.until(lambda: (record.generation_id, 1) in pair.worker.ended())
    assert (await pair.second.record(record.generation_id)).state is State.CANCELLED


async def _follow_both(redis: Redis) -> bool:
    ((_, count),) = await redis.pubsub_numsub(CHANNEL)
    return bool(count == 2)


async def test_a_cancel_reaches_an_attempt_that_its_owner_took_over_and_never_assigned(pair: Pair) -> None:
    record = await pair.first.submit()
    assert await pair.first.dispatch()
    await pair.worker.until(lambda: bool(pair.worker.assignments()))
    pair.worker.say(record.generation_id, 1, delta(Cursor(), 1, 2))
    await pair.worker.until(lambda: bool(pair.worker.received_of("ack")))
    pair.worker.hold(record.generation_id, 1, position=2)
    await pair.worker.announce(pair.second.address)
    await pair.worker.until(lambda: any(v.resend_from == 3 for v in pair.worker.verdicts()))
    assert await pair.second.parts.cancellation.cancel(record.tenant_id, record.generation_id) is State.RUNNING
    await pair.worker.until(lambda: bool(pair.worker.received_of("cancel")))
