"""Attempts that are lost, superseded or unknown, and what becomes of their generations."""

from datetime import timedelta
from typing import cast

import grpc
import pytest

from inference.internal.v1 import worker_pb2
from scheduler.policy import back_off
from service_kit.ids import GatewayId
from state_store.delta_log.memory import MemoryDeltaLog
from state_store.delta_log.port import DeltaLogReader, OpenItem
from state_store.model import AttemptOutcome, CancelCause, State
from tests.integration.scheduler.steps import gone, granted, queued_again, tokens
from tests.support.polling import eventually
from tests.support.scheduler_rig import SchedulerRig, make_generation
from tests.support.scripted_worker import ScriptedWorker


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


async def test_after_a_lost_worker_the_next_attempt_continues_behind_the_log(
    rig: SchedulerRig, worker: ScriptedWorker
) -> None:
    generation_id = await granted(rig, worker)
    first = tokens(None, 10, 11)
    worker.say(generation_id, 1, first)
    await worker.until(lambda: bool(worker.received_of("ack")))
    await worker.stop()
    await gone(rig)
    other = ScriptedWorker()
    await other.start()
    try:
        await other.announce(rig.address)
        await eventually(lambda: bool(rig.parts.registry.ready()))
        await queued_again(rig, generation_id)
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
        await gone(rig)
        if attempt < 3:
            await queued_again(rig, record.generation_id)
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
