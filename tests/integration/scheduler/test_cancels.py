"""Cancels: queued, granted, on their way, many at once; over memory twins and real servers."""

import asyncio
from collections.abc import Sequence

import pytest

from service_kit.errors import NotFoundError
from service_kit.ids import GenerationId, TenantId, new_generation_id
from service_kit.sampling import FinishReason
from state_store.model import CancelCause, GenerationRecord, State
from state_store.ports import GrantRequest, GrantResult
from tests.integration.scheduler.steps import granted, tokens
from tests.support.scheduler_rig import SchedulerRig
from tests.support.scripted_worker import ScriptedWorker


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
