"""The scheduler with a scripted worker: from submit to the end, over memory twins and real servers."""

from collections.abc import Sequence

import pytest

from inference.internal.v1 import worker_pb2
from scheduler import news_writer
from scheduler.queue.port import OutputCharge
from service_kit.delta import Delta
from service_kit.sampling import FinishReason
from state_store.model import Finish, State
from state_store.ports import FinishResult
from tests.integration.scheduler.steps import granted, tokens
from tests.support.polling import eventually
from tests.support.scheduler_rig import MODEL_KEY, TENANT, SchedulerRig
from tests.support.scripted_worker import ScriptedWorker


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


async def test_a_worker_failure_ends_the_generation_as_failed(rig: SchedulerRig, worker: ScriptedWorker) -> None:
    generation_id = await granted(rig, worker)
    worker.say(generation_id, 1, None, failure="a row of logits is not finite")
    await worker.until(lambda: (generation_id, 1) in worker.ended())
    record = await rig.record(generation_id)
    assert (record.state, record.error_reason) == (State.FAILED, "ENGINE_FAILURE")
