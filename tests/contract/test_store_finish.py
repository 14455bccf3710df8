import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from service_kit.delta import Cursor, Delta, extend_chain, join, rest_after
from service_kit.errors import Reason
from service_kit.ids import GenerationId, TenantId
from service_kit.sampling import FinishReason
from state_store.model import AttemptOutcome, CancelCause, DeadLetter, State
from state_store.ports import AttemptEnd, ChunkWrite, DeadLetterFilter, FinishKind, GrantKind, SubmitKind
from tests.support.generations import (
    NOW,
    Store,
    end_of_queued,
    finish_of,
    grant_request,
    granted,
    new_generation,
    opened,
    output,
    requeued,
    running,
    state_of,
    submitted,
)


def success(record, delta: Delta | None, **fields):
    return finish_of(record, **{"output": delta, "output_tokens": delta.last if delta is not None else 0, **fields})


def chunk(record, delta: Delta, **fields) -> ChunkWrite:
    default = ChunkWrite(generation_id=record.generation_id, attempt=record.attempt, output=delta)
    return replace(default, **fields)


def tail(delta: Delta, after: int) -> Delta:
    """The part of `delta` (one that starts at 1) behind its token `after`."""
    chain = extend_chain(delta.prev_chain, delta.token_ids[:after])
    rest = rest_after(Cursor(sequence_number=after, chain=chain), delta)
    assert rest is not None
    return rest


async def test_a_success_is_final_with_output_usage_and_the_end_of_its_attempt(store: Store) -> None:
    record, delta = await running(store), output(5)
    finish = success(record, delta, cached_prompt_tokens=2, finish_reason=FinishReason.LENGTH, matched_stop="é")
    [result] = await store.finish_many([finish], now=NOW)
    expected = replace(
        record,
        state=State.SUCCEEDED,
        session_id=None,
        finished_at=NOW,
        finish_reason=FinishReason.LENGTH,
        matched_stop="é",
        cached_prompt_tokens=2,
        output_tokens=5,
    )
    assert (result.kind, result.record) == (FinishKind.FINISHED, expected)
    assert await state_of(store, record) == expected
    assert await store.read_output_many([record.generation_id, GenerationId("unknown")]) == [delta, None]
    assert await store.stored_ends_many([record.generation_id, GenerationId("unknown")]) == [delta.end, Cursor()]
    [attempt] = await store.attempts_of(record.generation_id)
    assert (attempt.outcome, attempt.end_position, attempt.is_charged) == (AttemptOutcome.FINISHED, 5, False)
    [row] = await store.ledger_of(record.generation_id)
    assert (row.state, row.prompt_tokens, row.cached_prompt_tokens, row.output_tokens) == (State.SUCCEEDED, 3, 2, 5)
    assert (row.tenant_id, row.key_id, row.finished_at) == (record.tenant_id, record.key_id, NOW)
    assert await store.dead_letters(limit=5) == []


async def test_finishing_twice_writes_once_and_tells_the_first_end(store: Store) -> None:
    record = await running(store)
    finish = success(record, output(3))
    other = finish_of(record, state=State.FAILED, finish_reason=None, error_reason=Reason.INTERNAL)
    results = await store.finish_many([finish, other], now=NOW)
    [again] = await store.finish_many([success(record, output(3))], now=NOW + timedelta(seconds=1))
    assert [result.kind for result in results] == [FinishKind.FINISHED, FinishKind.ALREADY_FINISHED]
    assert again.kind is FinishKind.ALREADY_FINISHED
    assert results[0].record == results[1].record == again.record == await state_of(store, record)
    assert len(await store.ledger_of(record.generation_id)) == 1


async def test_concurrent_ends_leave_one_final_state_and_one_charge(store: Store) -> None:
    records = [await running(store) for _ in range(3)]
    turns = [records[:: 1 if turn % 2 else -1] for turn in range(6)]
    answers = await asyncio.gather(
        *(store.finish_many([success(record, output(turn)) for record in batch]) for turn, batch in enumerate(turns, 1))
    )
    kinds = [result.kind for answer in answers for result in answer]
    assert (kinds.count(FinishKind.FINISHED), kinds.count(FinishKind.ALREADY_FINISHED)) == (3, 15)
    for record in records:
        [row] = await store.ledger_of(record.generation_id)
        [stored] = await store.read_output_many([record.generation_id])
        assert stored is not None
        assert row.output_tokens == stored.last


async def test_a_deposed_attempt_cannot_end_the_generation(store: Store) -> None:
    deposed = await running(store)
    await requeued(store, deposed)
    [while_queued] = await store.finish_many([success(deposed, output(3))])
    current = await granted(store, await state_of(store, deposed), await opened(store))
    [while_running] = await store.finish_many([success(deposed, output(3))])
    assert (while_queued.kind, while_running.kind) == (FinishKind.STALE, FinishKind.STALE)
    assert await state_of(store, deposed) == current
    assert await store.ledger_of(deposed.generation_id) == []


async def test_a_transition_that_does_not_exist_is_refused_and_its_neighbours_go_on(store: Store) -> None:
    queued, good = await submitted(store), await running(store)
    unknown = replace(success(good, None), generation_id=GenerationId("unknown"))
    impossible = finish_of(queued, state=State.SUCCEEDED)
    not_final = finish_of(good, state=State.QUEUED, finish_reason=None)
    results = await store.finish_many([impossible, not_final, unknown, success(good, output(2))])
    assert [result.kind for result in results] == [FinishKind.STALE] * 3 + [FinishKind.FINISHED]
    assert await state_of(store, queued) == queued


@pytest.mark.parametrize("final", [State.CANCELLED, State.EXPIRED, State.FAILED])
async def test_a_queued_generation_can_end_without_a_worker(store: Store, final: State) -> None:
    record = await submitted(store)
    [result] = await store.finish_many([end_of_queued(record, state=final)], now=NOW)
    assert (result.kind, result.record) == (FinishKind.FINISHED, replace(record, state=final, finished_at=NOW))
    [row] = await store.ledger_of(record.generation_id)
    assert (row.state, row.output_tokens) == (final, 0)


async def test_a_requeued_generation_ends_with_what_its_log_holds(store: Store) -> None:
    record = await requeued(store, await running(store))
    delta = output(4)
    [result] = await store.finish_many([end_of_queued(record, output=delta, output_tokens=4)])
    assert result.kind is FinishKind.FINISHED
    assert await store.read_output_many([record.generation_id]) == [delta]


@pytest.mark.parametrize(
    ("delta", "output_tokens"),
    [
        (output(3), 4),
        (output(3), 2),
        (None, 1),
        (tail(output(5), 2), 5),
        (replace(output(3), prev_chain=9), 3),
    ],
    ids=["too-short", "too-long", "missing", "gap", "foreign-chain"],
)
async def test_output_that_does_not_reach_the_end_is_refused(
    store: Store, delta: Delta | None, output_tokens: int
) -> None:
    record = await running(store)
    good = await running(store)
    finish = finish_of(record, output=delta, output_tokens=output_tokens)
    results = await store.finish_many([finish, success(good, output(1))])
    assert [result.kind for result in results] == [FinishKind.INCOMPLETE, FinishKind.FINISHED]
    assert await state_of(store, record) == record
    assert await store.read_output_many([record.generation_id]) == [None]


@pytest.mark.parametrize("from_token", [0, 1, 3], ids=["whole", "overlap", "adjacent"])
async def test_the_overlap_of_output_and_stored_chunks_is_stored_once(store: Store, from_token: int) -> None:
    record, whole = await running(store), output(6)
    assert await store.store_chunks_many([chunk(record, output(3))]) == [True]
    delta = tail(whole, from_token) if from_token else whole
    [result] = await store.finish_many([success(record, delta)])
    assert result.kind is FinishKind.FINISHED
    assert await store.read_output_many([record.generation_id]) == [whole]


@pytest.mark.parametrize(
    "delta", [output(6, base=500), tail(output(6, base=500), 2), output(2, base=500), None], ids=str
)
async def test_output_that_contradicts_stored_chunks_is_refused(store: Store, delta: Delta | None) -> None:
    record = await running(store)
    await store.store_chunks_many([chunk(record, output(3))])
    tokens = max(delta.last, 3) if delta is not None else 4
    [result] = await store.finish_many([finish_of(record, output=delta, output_tokens=tokens)])
    assert result.kind is FinishKind.INCOMPLETE
    assert await store.read_output_many([record.generation_id]) == [output(3)]


async def test_stored_chunks_alone_may_be_the_whole_output(store: Store) -> None:
    records = [await running(store) for _ in range(3)]
    await store.store_chunks_many([chunk(record, output(3)) for record in records])
    outputs = (None, output(3), output(2))
    finishes = [finish_of(it, output=delta, output_tokens=3) for it, delta in zip(records, outputs, strict=True)]
    results = await store.finish_many(finishes)
    assert [result.kind for result in results] == [FinishKind.FINISHED] * 3
    assert await store.read_output_many([record.generation_id for record in records]) == [output(3)] * 3


async def test_chunks_grow_in_order_and_are_stored_once(store: Store) -> None:
    record, whole = await running(store), output(9)
    writes = [
        chunk(record, output(3)),
        chunk(record, output(3)),
        chunk(record, output(2)),
        chunk(record, tail(output(6), 1)),
        chunk(record, tail(whole, 6)),
        chunk(record, whole),
    ]
    assert await store.store_chunks_many(writes[:4]) == [True] * 4
    assert await store.store_chunks_many(writes[4:]) == [True] * 2
    assert await store.read_output_many([record.generation_id]) == [whole]
    assert await store.stored_ends_many([record.generation_id]) == [whole.end]
    assert join([output(6), tail(whole, 6)]) == whole


async def test_log_probabilities_of_all_attempts_are_stored_with_their_tokens(store: Store) -> None:
    record, other = await running(store), await running(store)
    whole = output(9, has_logprobs=True)
    first = chunk(record, output(3, has_logprobs=True))
    assert await store.store_chunks_many([first, chunk(other, output(2))]) == [True, True]
    assert await store.store_chunks_many([chunk(record, tail(output(6, has_logprobs=True), 1))]) == [True]
    [result] = await store.finish_many([success(record, tail(whole, 5))])
    assert result.kind is FinishKind.FINISHED
    stored, without = await store.read_output_many([record.generation_id, other.generation_id])
    assert stored == whole
    assert stored is not None
    assert len(stored.logprobs) == 9
    assert without == output(2)


async def test_a_chunk_that_does_not_continue_is_refused_and_its_neighbours_are_stored(store: Store) -> None:
    record, other = await running(store), await running(store)
    await store.store_chunks_many([chunk(record, output(3))])
    answers = await store.store_chunks_many(
        [
            chunk(record, output(6, base=500)),
            chunk(record, output(2, base=500)),
            chunk(record, tail(output(9), 5)),
            chunk(record, output(6), attempt=2),
            chunk(other, output(1)),
            chunk(record, output(4), generation_id=GenerationId("unknown")),
        ]
    )
    assert answers == [False, False, False, False, True, False]
    assert await store.read_output_many([record.generation_id, other.generation_id]) == [output(3), output(1)]


async def test_chunks_are_stored_only_while_the_attempt_runs(store: Store) -> None:
    record = await running(store)
    queued = await requeued(store, record)
    assert await store.store_chunks_many([chunk(record, output(1)), chunk(queued, output(1))]) == [False, False]


async def test_cancel_against_complete_ends_in_whichever_committed_first(store: Store) -> None:
    record = await running(store)
    complete = success(record, output(3))
    cancel = success(record, output(2), state=State.CANCELLED, finish_reason=FinishReason.CANCELLED)
    cancelled, completed, _ = await asyncio.gather(
        store.finish_many([cancel]),
        store.finish_many([complete]),
        store.request_cancel_many([(record.generation_id, CancelCause.CLIENT)]),
    )
    kinds = {cancelled[0].kind, completed[0].kind}
    final = await state_of(store, record)
    assert kinds == {FinishKind.FINISHED, FinishKind.ALREADY_FINISHED}
    assert cancelled[0].record is not None
    assert completed[0].record is not None
    assert (final.state, final.output_tokens) in [(State.CANCELLED, 2), (State.SUCCEEDED, 3)]
    assert final.state is cancelled[0].record.state is completed[0].record.state
    [row] = await store.ledger_of(record.generation_id)
    assert row.output_tokens == final.output_tokens


async def test_a_worker_that_completes_although_its_end_was_asked_for_succeeds(store: Store) -> None:
    record = await running(store)
    await store.request_cancel_many([(record.generation_id, CancelCause.CLIENT)])
    [result] = await store.finish_many([success(record, output(2))])
    assert result.kind is FinishKind.FINISHED


async def test_used_up_attempts_leave_a_dead_letter_that_names_the_workers(store: Store) -> None:
    record = await submitted(store)
    for number in (1, 2, 3):
        record = await granted(store, record, await opened(store, worker_id=f"worker-{number}"))
        ended = AttemptEnd(
            generation_id=record.generation_id,
            attempt=record.attempt,
            outcome=AttemptOutcome.SESSION_LOST,
            end_position=0,
            is_charged=True,
        )
        await store.record_attempt_ends([ended])
        record = await requeued(store, record)
    failure = finish_of(
        record,
        state=State.FAILED,
        finish_reason=None,
        error_reason=Reason.ATTEMPTS_EXHAUSTED,
        error_message="three workers\x00died",
    )
    [result] = await store.finish_many([failure], now=NOW)
    expected = DeadLetter(
        generation_id=record.generation_id,
        tenant_id=record.tenant_id,
        reason=Reason.ATTEMPTS_EXHAUSTED,
        message="three workers\N{REPLACEMENT CHARACTER}died",
        attempts=3,
        worker_ids=("worker-1", "worker-2", "worker-3"),
        created_at=NOW,
    )
    assert result.kind is FinishKind.FINISHED
    assert await store.dead_letters(limit=5) == [expected]
    attempts = await store.attempts_of(record.generation_id)
    assert [attempt.outcome for attempt in attempts] == [AttemptOutcome.SESSION_LOST] * 3


async def test_dead_letters_are_listed_newest_first(store: Store) -> None:
    records = [await submitted(store) for _ in range(3)]
    for age, record in enumerate(records):
        failure = end_of_queued(record, state=State.FAILED, error_reason=Reason.ATTEMPTS_EXHAUSTED)
        await store.finish_many([failure], now=NOW + timedelta(seconds=age))
    letters = await store.dead_letters(limit=2)
    assert [letter.generation_id for letter in letters] == [record.generation_id for record in records[:0:-1]]


async def test_dead_letters_are_found_by_id_tenant_reason_and_time(store: Store) -> None:
    records = [await submitted(store, tenant_id=TenantId(name)) for name in ("tenant-a", "tenant-b", "tenant-b")]
    for age, record in enumerate(records):
        failure = end_of_queued(record, state=State.FAILED, error_reason=Reason.ATTEMPTS_EXHAUSTED)
        await store.finish_many([failure], now=NOW + timedelta(seconds=age))
    first, second, third = (record.generation_id for record in records)

    async def found(**wanted: Any) -> list[str]:
        return [it.generation_id for it in await store.dead_letters(limit=9, wanted=DeadLetterFilter(**wanted))]

    assert await found() == [third, second, first]
    assert await found(tenant_id="tenant-b") == [third, second]
    assert await found(tenant_id="tenant-b", since=NOW + timedelta(seconds=2)) == [third]
    assert await found(since=NOW + timedelta(seconds=3)) == []
    assert await found(reason="ATTEMPTS_EXHAUSTED", generation_id=first) == [first]
    assert await found(reason="OTHER") == await found(generation_id="no-id") == []


async def test_a_requeue_of_a_dead_letter_is_a_new_generation(store: Store) -> None:
    record = await submitted(store)
    await store.finish_many([end_of_queued(record, state=State.FAILED)])
    [result] = await store.submit_many([new_generation(requeue_of=record.generation_id)])
    assert result.kind is SubmitKind.CREATED
    [again] = await store.grant_many([grant_request(result.record, await opened(store))])
    assert again.kind is GrantKind.GRANTED
