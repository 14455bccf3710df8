import asyncio
from dataclasses import replace
from datetime import timedelta

from service_kit.ids import GenerationId, SessionId
from state_store.model import AttemptOutcome, CancelCause, GenerationSummary, ModelKey, State
from state_store.ports import AttemptEnd, AttemptRef, GrantKind, RequeueKind
from state_store.transitions import MAX_ATTEMPTS, MAX_CHARGED_ATTEMPTS
from tests.support.generations import (
    LEASE,
    NOW,
    Store,
    end_of_queued,
    finish_of,
    grant_request,
    granted,
    new_session,
    opened,
    running,
    state_of,
    submitted,
)


def ref(record) -> AttemptRef:
    return AttemptRef(generation_id=record.generation_id, attempt=record.attempt)


def end(record, **fields) -> AttemptEnd:
    default = AttemptEnd(
        generation_id=record.generation_id,
        attempt=record.attempt,
        outcome=AttemptOutcome.SESSION_LOST,
        end_position=3,
        is_charged=False,
    )
    return replace(default, **fields)


async def test_a_grant_starts_the_next_attempt_on_the_session(store: Store) -> None:
    record, session_id = await submitted(store), await opened(store)
    [result] = await store.grant_many([grant_request(record, session_id)], now=NOW)
    expected = replace(
        record, state=State.RUNNING, attempt=1, session_id=session_id, nonce=(1 << 64) - 1, started_at=NOW
    )
    assert (result.kind, result.record) == (GrantKind.GRANTED, expected)
    assert await state_of(store, record) == expected
    [attempt] = await store.attempts_of(record.generation_id)
    assert (attempt.attempt, attempt.session_id, attempt.worker_id) == (1, session_id, "worker-1")
    assert (attempt.nonce, attempt.granted_at, attempt.ended_at, attempt.outcome) == ((1 << 64) - 1, NOW, None, None)


async def test_each_item_of_a_grant_is_answered_alone(store: Store) -> None:
    session_id, other = await opened(store), await opened(store, model_key=ModelKey(revision="2", precision="fp32"))
    records = [await submitted(store) for _ in range(5)]
    unknown = replace(records[0], generation_id=GenerationId("0193a000-0000-7000-8000-000000000000"))
    results = await store.grant_many(
        [
            grant_request(records[0], session_id),
            grant_request(records[0], session_id),
            grant_request(records[1], session_id, owner_epoch=2),
            grant_request(records[2], other),
            grant_request(records[3], SessionId("unknown")),
            grant_request(records[4], session_id, after_attempt=1),
            grant_request(unknown, session_id),
            grant_request(records[4], session_id),
        ],
        now=NOW,
    )
    assert [result.kind for result in results] == [
        GrantKind.GRANTED,
        GrantKind.NOT_QUEUED,
        GrantKind.FENCED,
        GrantKind.FENCED,
        GrantKind.FENCED,
        GrantKind.NOT_QUEUED,
        GrantKind.NOT_QUEUED,
        GrantKind.GRANTED,
    ]
    assert all((result.record is not None) == (result.kind is GrantKind.GRANTED) for result in results)


async def test_concurrent_grants_of_one_generation_give_it_to_one_session(store: Store) -> None:
    records = [await submitted(store) for _ in range(4)]
    sessions = [await opened(store) for _ in range(6)]
    answers = await asyncio.gather(
        *(
            store.grant_many([grant_request(record, session_id) for record in records[:: 1 if turn % 2 else -1]])
            for turn, session_id in enumerate(sessions)
        )
    )
    kinds = [result.kind for answer in answers for result in answer]
    assert (kinds.count(GrantKind.GRANTED), kinds.count(GrantKind.NOT_QUEUED)) == (4, 20)
    for record in records:
        assert [attempt.attempt for attempt in await store.attempts_of(record.generation_id)] == [1]


async def test_a_generation_whose_end_was_asked_for_is_not_granted(store: Store) -> None:
    record, session_id = await submitted(store), await opened(store)
    await store.request_cancel_many([(record.generation_id, CancelCause.CLIENT)])
    [result] = await store.grant_many([grant_request(record, session_id)])
    assert result.kind is GrantKind.NOT_QUEUED


async def test_a_final_generation_is_not_granted(store: Store) -> None:
    record, session_id = await submitted(store), await opened(store)
    await store.finish_many([end_of_queued(record)])
    [result] = await store.grant_many([grant_request(record, session_id)])
    assert result.kind is GrantKind.NOT_QUEUED


async def test_a_deposed_owner_cannot_grant_on_the_session(store: Store) -> None:
    session = new_session()
    for _ in range(2):
        await store.open_session(session, lease=LEASE)
    record = await submitted(store)
    stale, current = [grant_request(record, session.session_id, owner_epoch=epoch) for epoch in (1, 2)]
    assert [result.kind for result in await store.grant_many([stale])] == [GrantKind.FENCED]
    assert [result.kind for result in await store.grant_many([current])] == [GrantKind.GRANTED]


async def test_a_lost_session_is_not_granted_to(store: Store) -> None:
    record, session_id = await submitted(store), await opened(store)
    await store.lose_session(session_id, 1)
    [result] = await store.grant_many([grant_request(record, session_id)])
    assert result.kind is GrantKind.FENCED


async def test_a_requeued_generation_waits_again_and_its_next_attempt_gets_the_next_number(store: Store) -> None:
    record = await running(store)
    [result] = await store.requeue_many([ref(record)], now=NOW)
    assert (result.kind, result.record) == (RequeueKind.REQUEUED, replace(record, state=State.QUEUED, session_id=None))
    assert result.record is not None
    again = await granted(store, result.record, await opened(store), nonce=5)
    assert (again.attempt, again.nonce, again.started_at) == (2, 5, record.started_at)
    first, second = await store.attempts_of(record.generation_id)
    assert (first.ended_at, first.outcome, second.ended_at) == (NOW, None, None)


async def test_a_requeue_by_a_deposed_attempt_is_stale(store: Store) -> None:
    record = await running(store)
    stale = replace(ref(record), attempt=0)
    results = await store.requeue_many([stale, ref(record), ref(record)])
    assert [result.kind for result in results] == [RequeueKind.STALE, RequeueKind.REQUEUED, RequeueKind.STALE]
    assert results[0].record is None


async def test_a_requeue_with_a_cancel_cause_is_left_running_to_be_ended(store: Store) -> None:
    record = await running(store)
    await store.request_cancel_many([(record.generation_id, CancelCause.GRACE)])
    [result] = await store.requeue_many([ref(record)])
    assert result.kind is RequeueKind.TO_END
    assert result.record == replace(record, cancel_cause=CancelCause.GRACE)
    assert await state_of(store, record) == result.record


async def test_three_charged_attempts_leave_none(store: Store) -> None:
    record = await running(store)
    for charges in range(1, MAX_CHARGED_ATTEMPTS + 1):
        assert await store.record_attempt_ends([end(record, is_charged=True)]) == [True]
        [result] = await store.requeue_many([ref(record)])
        assert result.record is not None
        assert result.record.charged_attempts == charges
        if charges < MAX_CHARGED_ATTEMPTS:
            assert result.kind is RequeueKind.REQUEUED
            record = await granted(store, result.record, await opened(store))
    assert result.kind is RequeueKind.TO_END


async def test_twenty_attempts_leave_none_even_uncharged(store: Store) -> None:
    session_id, record = await opened(store), await submitted(store)
    for _ in range(MAX_ATTEMPTS):
        record = await granted(store, record, session_id)
        [result] = await store.requeue_many([ref(record)])
        assert result.record is not None
        record = result.record
    assert (result.kind, record.attempt) == (RequeueKind.TO_END, MAX_ATTEMPTS)
    numbers = [attempt.attempt for attempt in await store.attempts_of(record.generation_id)]
    assert numbers == list(range(1, MAX_ATTEMPTS + 1))


async def test_a_charge_that_arrives_after_the_requeue_stops_the_next_grant(store: Store) -> None:
    session_id, record = await opened(store), await submitted(store)
    for _ in range(MAX_CHARGED_ATTEMPTS):
        record = await granted(store, record, session_id)
        [result] = await store.requeue_many([ref(record)])
        assert result.record is not None
        record = result.record
    ends = [end(record, attempt=number, is_charged=True) for number in (1, 2, 3)]
    assert await store.record_attempt_ends(ends) == [True] * 3
    [refused] = await store.grant_many([grant_request(record, session_id)])
    assert refused.kind is GrantKind.NOT_QUEUED
    assert await store.cancelled_queued_page(after=None, limit=5) == [
        GenerationSummary.of(replace(record, charged_attempts=3))
    ]


async def test_an_attempt_end_is_recorded_once_and_charges_once(store: Store) -> None:
    record = await running(store)
    first, twin = end(record, is_charged=True), end(record, is_charged=True, end_position=4)
    unknown = end(record, attempt=7)
    assert await store.record_attempt_ends([first, twin, unknown], now=NOW) == [True, False, False]
    assert await store.record_attempt_ends([first], now=NOW + timedelta(seconds=1)) == [False]
    [attempt] = await store.attempts_of(record.generation_id)
    assert (attempt.outcome, attempt.end_position, attempt.is_charged) == (AttemptOutcome.SESSION_LOST, 3, True)
    assert attempt.ended_at == NOW
    assert (await state_of(store, record)).charged_attempts == 1


async def test_the_outcome_of_a_requeued_attempt_keeps_the_time_of_the_requeue(store: Store) -> None:
    record = await running(store)
    await store.requeue_many([ref(record)], now=NOW)
    assert await store.record_attempt_ends([end(record)], now=NOW + timedelta(seconds=9)) == [True]
    [attempt] = await store.attempts_of(record.generation_id)
    assert (attempt.ended_at, attempt.outcome) == (NOW, AttemptOutcome.SESSION_LOST)


async def test_the_first_cancel_cause_stays(store: Store) -> None:
    record, unknown = await submitted(store), GenerationId("unknown")
    answers = await store.request_cancel_many(
        [
            (record.generation_id, CancelCause.DEADLINE),
            (unknown, CancelCause.CLIENT),
            (record.generation_id, CancelCause.CLIENT),
        ]
    )
    expected = replace(record, cancel_cause=CancelCause.DEADLINE)
    assert answers[1] is None
    assert answers[2] == expected
    assert await store.request_cancel_many([(record.generation_id, CancelCause.GRACE)]) == [expected]


async def test_a_cancel_after_the_end_changes_nothing(store: Store) -> None:
    record = await running(store)
    [finished] = await store.finish_many([finish_of(record)])
    assert await store.request_cancel_many([(record.generation_id, CancelCause.CLIENT)]) == [finished.record]
    assert finished.record is not None
    assert finished.record.cancel_cause is None


async def test_empty_batches_are_answered_with_empty_lists(store: Store) -> None:
    assert await store.submit_many([]) == []
    assert await store.grant_many([]) == []
    assert await store.finish_many([]) == []
    assert await store.requeue_many([]) == []
    assert await store.record_attempt_ends([]) == []
    assert await store.request_cancel_many([]) == []
    assert await store.store_chunks_many([]) == []
    assert await store.renew_many([], lease=LEASE) == []
    assert await store.get_many([]) == []
