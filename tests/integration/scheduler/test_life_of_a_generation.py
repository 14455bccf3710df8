"""The scheduler with a scripted worker: the whole life of a generation, over memory twins and real servers."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import cast

import grpc
import pytest

from inference.internal.v1 import worker_pb2
from scheduler import news_writer
from scheduler.policy import back_off
from scheduler.queue.port import OutputCharge
from service_kit.delta import Cursor, Delta, make_delta
from service_kit.errors import NotFoundError
from service_kit.ids import GatewayId, GenerationId, TenantId, new_generation_id
from service_kit.sampling import FinishReason
from state_store.delta_log.memory import MemoryDeltaLog
from state_store.delta_log.port import DeltaLogReader, OpenItem
from state_store.model import AttemptOutcome, CancelCause, Finish, GenerationRecord, State
from state_store.ports import FinishResult, GrantRequest, GrantResult
from tests.support.polling import eventually
from tests.support.scheduler_rig import MODEL_KEY, TENANT, SchedulerRig, make_generation
from tests.support.scripted_worker import ScriptedWorker


def tokens(after: Delta | None, *ids: int) -> Delta:
    cursor = after.end if after is not None else Cursor()
    return make_delta(after=cursor, token_ids=ids, texts=[f"<{token_id}>" for token_id in ids])


async def granted(rig: SchedulerRig, worker: ScriptedWorker, **changes: object) -> str:
    record = await rig.submit(make_generation(**changes))  # type: ignore[arg-type]
    assert await rig.dispatch()
    await worker.until(lambda: any(a.generation_id == record.generation_id for a in worker.assignments()))
    return record.generation_id


async def test_a_generation_goes_from_submit_to_succeeded_with_its_output_and_one_ledger_row(
    rig: SchedulerRig, worker: ScriptedWorker
) -> None:
    generation_id = await granted(rig, worker)
    first = tokens(None, 10, 11)
    worker.say(generation_id, 1, first)
    second = tokens(first, 12)
    worker.say(generation_id, 1, second, finish_reason="STOP", output_tokens=3)
    await worker.until(lambda: (generation_id, 1) in worker.ended())
    record = await rig.record(generation_id)
    assert (record.state, record.finish_reason, record.output_tokens) == (State.SUCCEEDED, FinishReason.STOP, 3)
    output = (await rig.stores.store.read_output_many([record.generation_id]))[0]
    assert output is not None
    assert output.token_ids == (10, 11, 12)
    assert len(await rig.stores.store.ledger_of(record.generation_id)) == 1
    view = (await rig.stores.log.read_many([(record.generation_id, 0)]))[0]
    assert view.terminal is not None
    assert view.terminal.output_tokens == 3


async def test_each_token_is_charged_to_its_tenant_once_however_often_it_is_sent(
    rig: SchedulerRig, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged: list[OutputCharge] = []

    async def note(charges: Sequence[OutputCharge]) -> None:
        charged.extend(charges)

    monkeypatch.setattr(rig.stores.queue, "charge_many", note)
    generation_id = await granted(rig, worker)
    first = tokens(None, 10, 11)
    third = tokens(tokens(first, 12), 13)
    for delta in (first, first, third, tokens(None, 10, 11, 12), tokens(first, 12)):
        worker.say(generation_id, 1, delta)
    await worker.until(lambda: len(worker.received_of("ack")) == 5)
    await rig.parts.charges.flush_once()
    expected = OutputCharge(model_key=MODEL_KEY, tenant_id=TENANT, weight=1.0, tokens=3)
    assert charged == [expected], "a repetition, a gap and an overlap append nothing"


async def test_every_batch_is_acknowledged_in_order(rig: SchedulerRig, worker: ScriptedWorker) -> None:
    generation_id = await granted(rig, worker)
    delta: Delta | None = None
    for token_id in range(5):
        delta = tokens(delta, token_id)
        worker.say(generation_id, 1, delta)
    await worker.until(lambda: [ack.batch for ack in worker.received_of("ack")] == [1, 2, 3, 4, 5])


async def test_a_gap_makes_the_worker_send_again_from_the_end_of_the_log(
    rig: SchedulerRig, worker: ScriptedWorker
) -> None:
    generation_id = await granted(rig, worker)
    first = tokens(None, 10)
    worker.say(generation_id, 1, first)
    worker.say(generation_id, 1, tokens(tokens(first, 11), 12))
    await worker.until(
        lambda: (
            [(v.action, v.resend_from) for v in worker.verdicts() if v.action == worker_pb2.VERDICT_ACTION_RESEND_FROM]
            == [(worker_pb2.VERDICT_ACTION_RESEND_FROM, 2)]
        )
    )


async def test_an_end_whose_tokens_are_missing_is_not_committed(rig: SchedulerRig, worker: ScriptedWorker) -> None:
    generation_id = await granted(rig, worker)
    worker.say(generation_id, 1, None, finish_reason="STOP", output_tokens=2)
    await worker.until(lambda: any(v.resend_from == 1 for v in worker.verdicts()))
    assert (await rig.record(generation_id)).state is State.RUNNING


async def test_a_lost_assign_is_repeated_once_and_then_given_back_uncharged(
    rig: SchedulerRig, worker: ScriptedWorker
) -> None:
    generation_id = await granted(rig, worker)
    rig.clock.advance(2.1)
    worker.heartbeat()
    await worker.until(lambda: len(worker.assignments()) == 2)
    assert worker.assignments()[0] == worker.assignments()[1]
    rig.clock.advance(2.1)
    await rig.parts.registry.compare_once()
    record = await rig.record(generation_id)
    assert (record.state, record.attempt, record.charged_attempts) == (State.QUEUED, 1, 0)
    attempt = (await rig.stores.store.attempts_of(record.generation_id))[0]
    assert (attempt.outcome, attempt.is_charged) == (AttemptOutcome.ASSIGNMENT_LOST, False)


async def test_a_cancel_right_behind_the_assign_reaches_the_worker_after_it(
    rig: SchedulerRig, worker: ScriptedWorker
) -> None:
    generation_id = await granted(rig, worker)
    record = await rig.record(generation_id)
    assert await rig.parts.cancellation.cancel(record.tenant_id, record.generation_id) is State.RUNNING
    await worker.until(lambda: bool(worker.received_of("cancel")))
    kinds = [request.WhichOneof("message") for request in worker.received]
    assert kinds.index("assign") < kinds.index("cancel")
    worker.say(generation_id, 1, tokens(None, 10), finish_reason="CANCELLED", output_tokens=1)
    await worker.until(lambda: (generation_id, 1) in worker.ended())
    ended = await rig.record(generation_id)
    assert (ended.state, ended.finish_reason, ended.output_tokens) == (State.CANCELLED, FinishReason.CANCELLED, 1)


async def test_cancelling_a_queued_generation_ends_it_at_once_and_clears_the_queue(rig: SchedulerRig) -> None:
    record = await rig.submit()
    assert await rig.parts.cancellation.cancel(record.tenant_id, record.generation_id) is State.CANCELLED
    assert await rig.parts.cancellation.cancel(record.tenant_id, record.generation_id) is State.CANCELLED
    entry = (record.model_key, record.generation_id, 0)
    assert await rig.stores.queue.contains_many([entry]) == [False]
    assert len(await rig.stores.store.ledger_of(record.generation_id)) == 1


async def test_cancels_of_one_moment_share_their_transactions_and_one_bad_id_fails_alone(
    rig: SchedulerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    request_cancel_many = rig.stores.store.request_cancel_many

    async def counted(
        items: Sequence[tuple[GenerationId, CancelCause]],
    ) -> list[GenerationRecord | None]:
        calls.append(len(items))
        return await request_cancel_many(items)

    monkeypatch.setattr(rig.stores.store, "request_cancel_many", counted)
    records = [await rig.submit() for _ in range(5)]
    names = [(record.tenant_id, record.generation_id) for record in records] * 20
    stranger = (TenantId("another"), records[0].generation_id)
    unknown = (records[0].tenant_id, new_generation_id())
    cancel = rig.parts.cancellation.cancel
    answers = await asyncio.gather(*(cancel(*name) for name in [*names, stranger, unknown]), return_exceptions=True)
    assert answers[:-2] == [State.CANCELLED] * 100
    assert [type(answer) for answer in answers[-2:]] == [NotFoundError, NotFoundError]
    assert len(calls) <= 2
    assert all([len(await rig.stores.store.ledger_of(record.generation_id)) == 1 for record in records])


async def test_a_cancel_that_comes_before_the_grant_is_known_here_follows_the_assignment(
    rig: SchedulerRig, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = await rig.submit()
    grant_many = rig.stores.store.grant_many

    async def cancelled_behind_the_commit(items: Sequence[GrantRequest]) -> list[GrantResult]:
        results = await grant_many(items)
        assert await rig.parts.cancellation.cancel(record.tenant_id, record.generation_id) is State.RUNNING
        return results

    monkeypatch.setattr(rig.stores.store, "grant_many", cancelled_behind_the_commit)
    assert await rig.dispatch()
    await worker.until(lambda: bool(worker.received_of("cancel")))
    kinds = [request.WhichOneof("message") for request in worker.received]
    assert kinds.index("assign") < kinds.index("cancel")


async def test_a_worker_of_another_revision_gets_none_of_the_work(rig: SchedulerRig) -> None:
    other = ScriptedWorker(revision="r2")
    await other.start()
    try:
        await other.announce(rig.address)
        await eventually(lambda: bool(rig.parts.registry.ready()))
        record = await rig.submit()
        assert not await rig.dispatch()
        assert (await rig.record(record.generation_id)).state is State.QUEUED
        same = ScriptedWorker()
        await same.start()
        try:
            await same.announce(rig.address)
            await eventually(lambda: len(rig.parts.registry.ready()) == 2)
            assert await rig.dispatch()
            await same.until(lambda: bool(same.assignments()))
            assert not other.assignments()
        finally:
            await same.stop()
    finally:
        await other.stop()


async def test_an_end_that_cannot_be_dealt_with_keeps_no_other_from_ending_and_is_tried_again(
    rig: SchedulerRig, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(news_writer, "BROKEN_END_PAUSE_S", 0.05)
    ids = [(await rig.submit()).generation_id for _ in range(4)]
    assert await rig.dispatch()
    await worker.until(lambda: len(worker.assignments()) == 4)
    finish_many, calls = rig.stores.store.finish_many, []

    async def raises_for_the_second(items: Sequence[Finish]) -> list[FinishResult]:
        calls.append([item.generation_id for item in items])
        if ids[1] in calls[-1] and len(calls) < 5:
            raise ValueError("a bug")
        return await finish_many(items)

    monkeypatch.setattr(rig.stores.store, "finish_many", raises_for_the_second)
    worker.say_all([worker.last_word(each, 1, finish_reason="STOP") for each in ids])
    await worker.until(lambda: len(worker.ended()) == 3)
    assert (ids[1], 1) not in worker.ended()
    assert (await rig.record(ids[1])).state is State.RUNNING
    await worker.until(lambda: any(v.action == worker_pb2.VERDICT_ACTION_RESEND_FROM for v in worker.verdicts()))
    worker.say(ids[1], 1, None, finish_reason="STOP")
    await worker.until(lambda: (ids[1], 1) in worker.ended())
    assert [len(await rig.stores.store.ledger_of(each)) for each in ids] == [1] * 4


async def test_after_a_lost_worker_the_next_attempt_continues_behind_the_log(
    rig: SchedulerRig, worker: ScriptedWorker
) -> None:
    generation_id = await granted(rig, worker)
    first = tokens(None, 10, 11)
    worker.say(generation_id, 1, first)
    await worker.until(lambda: bool(worker.received_of("ack")))
    await worker.stop()
    await _gone(rig)
    other = ScriptedWorker()
    await other.start()
    try:
        await other.announce(rig.address)
        await eventually(lambda: bool(rig.parts.registry.ready()))
        await _queued_again(rig, generation_id)
        assert await rig.dispatch()
        await other.until(lambda: bool(other.assignments()))
        assignment = other.assignments()[0]
        assert (assignment.attempt, list(assignment.output_token_ids)) == (2, [10, 11])
        other.say(generation_id, 2, tokens(first, 12), finish_reason="LENGTH", output_tokens=3)
        await other.until(lambda: (generation_id, 2) in other.ended())
    finally:
        await other.stop()
    record = await rig.record(generation_id)
    assert (record.state, record.attempt, record.charged_attempts) == (State.SUCCEEDED, 2, 0)
    output = (await rig.stores.store.read_output_many([record.generation_id]))[0]
    assert output is not None
    assert output.token_ids == (10, 11, 12)


async def _gone(rig: SchedulerRig) -> None:
    """Lets the reconnect window pass, whenever the broken stream is noticed."""

    def is_gone() -> bool:
        rig.clock.advance(0.6)
        return not len(rig.parts.registry)

    await eventually(is_gone)


async def _queued_again(rig: SchedulerRig, generation_id: str) -> None:
    record = await rig.record(generation_id)
    for _ in range(500):
        record = await rig.record(generation_id)
        entry = (record.model_key, record.generation_id, record.attempt)
        if record.state is State.QUEUED and await rig.stores.queue.contains_many([entry]) == [True]:
            return
    raise AssertionError(f"still {record.state}")


async def test_what_the_worker_names_and_postgres_does_not_know_is_aborted(
    rig: SchedulerRig, worker: ScriptedWorker
) -> None:
    generation_id = make_generation().generation_id
    worker.hold(generation_id, 1, position=5)
    worker.heartbeat()
    await worker.until(lambda: any(v.action == worker_pb2.VERDICT_ACTION_ABORT for v in worker.verdicts()))


async def test_an_attempt_superseded_in_the_log_is_aborted_and_counted(
    rig: SchedulerRig, worker: ScriptedWorker
) -> None:
    generation_id = await granted(rig, worker)
    record = await rig.record(generation_id)
    await rig.stores.log.open_many([OpenItem(generation_id=record.generation_id, attempt=2)])
    worker.say(generation_id, 1, tokens(None, 10))
    await worker.until(lambda: any(v.action == worker_pb2.VERDICT_ACTION_ABORT for v in worker.verdicts()))
    assert rig.parts.coordinator.num_stale_appends == 1


async def test_an_emptied_log_is_opened_again_and_refilled_by_the_worker(
    rig: SchedulerRig, worker: ScriptedWorker
) -> None:
    generation_id = await granted(rig, worker)
    first = tokens(None, 10, 11)
    worker.say(generation_id, 1, first)
    await worker.until(lambda: bool(worker.received_of("ack")))
    await rig.stores.lose_log_and_queue()
    worker.say(generation_id, 1, tokens(first, 12))
    await worker.until(lambda: any(v.resend_from == 1 for v in worker.verdicts()))
    whole = tokens(None, 10, 11, 12)
    worker.say(generation_id, 1, whole, finish_reason="STOP", output_tokens=3)
    await worker.until(lambda: (generation_id, 1) in worker.ended())
    assert (await rig.record(generation_id)).output_tokens == 3


async def test_a_session_that_is_over_must_come_back_as_a_new_one(rig: SchedulerRig, worker: ScriptedWorker) -> None:
    assert await rig.stores.store.lose_session(worker.session_id, 1) is not None
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.announce(rig.address)
    assert caught.value.code() is grpc.StatusCode.ABORTED


async def test_a_worker_failure_ends_the_generation_as_failed(rig: SchedulerRig, worker: ScriptedWorker) -> None:
    generation_id = await granted(rig, worker)
    worker.say(generation_id, 1, None, failure="a row of logits is not finite")
    await worker.until(lambda: (generation_id, 1) in worker.ended())
    record = await rig.record(generation_id)
    assert (record.state, record.error_reason) == (State.FAILED, "ENGINE_FAILURE")


async def test_three_attempts_that_add_nothing_end_as_failed_with_a_dead_letter(rig: SchedulerRig) -> None:
    record = await rig.submit()
    for attempt in (1, 2, 3):
        worker = ScriptedWorker()
        await worker.start()
        await worker.announce(rig.address)
        await eventually(lambda: bool(rig.parts.registry.ready()))
        assert await rig.dispatch()
        await worker.until(lambda: bool(worker.assignments()))  # noqa: B023
        assert worker.assignments()[0].attempt == attempt
        await worker.stop()
        await _gone(rig)
        if attempt < 3:
            await _queued_again(rig, record.generation_id)
            assert not await rig.dispatch()
            rig.clock.advance(back_off(attempt).total_seconds())
    for _ in range(500):
        ended = await rig.record(record.generation_id)
        if ended.state.is_terminal:
            break
    assert (ended.state, ended.error_reason, ended.charged_attempts) == (State.FAILED, "ATTEMPTS_EXHAUSTED", 3)
    assert len(await rig.stores.store.dead_letters(limit=10)) == 1


async def test_a_watched_generation_outlives_an_emptied_log_unless_its_watchers_stay_away(rig: SchedulerRig) -> None:
    record = await rig.submit(make_generation(grace=timedelta(seconds=10)))
    await cast("DeltaLogReader", rig.stores.log).attach_many(GatewayId("gateway-a"), [(record.generation_id, 0)])
    await rig.parts.reaper.run_once()
    rig.clock.advance(12)
    await rig.stores.lose_log_and_queue()
    # Its gateway has not noticed yet: as far as the log knows, nobody ever read it.
    await rig.parts.reaper.run_once()
    assert (await rig.record(record.generation_id)).state is State.QUEUED
    rig.clock.advance(10)
    await rig.parts.reaper.run_once()
    after = await rig.record(record.generation_id)
    assert (after.state, after.cancel_cause) == (State.CANCELLED, CancelCause.GRACE)


@pytest.mark.parametrize("stores", ["memory"], indirect=True)
async def test_grace_does_not_run_while_the_log_is_away(rig: SchedulerRig) -> None:
    log = cast("MemoryDeltaLog", rig.stores.log)
    record = await rig.submit(make_generation(grace=timedelta(seconds=10)))
    await log.attach_many(GatewayId("gateway-a"), [(record.generation_id, 0)])
    await rig.parts.reaper.run_once()
    log.is_reachable = False
    rig.clock.advance(60)
    await rig.parts.reaper.run_once()
    log.is_reachable = True
    await rig.parts.reaper.run_once()
    assert (await rig.record(record.generation_id)).state is State.QUEUED
    rig.clock.advance(17)
    await rig.parts.reaper.run_once()
    assert (await rig.record(record.generation_id)).cancel_cause is CancelCause.GRACE
