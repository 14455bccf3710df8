"""What is kept only for a time goes, and nothing else."""

from datetime import timedelta

from service_kit.ids import GenerationId, new_generation_id
from service_kit.sampling import FinishReason
from state_store.model import CancelCause, GenerationRecord, State
from tests.support.generations import (
    LEASE,
    NOW,
    Store,
    finish_of,
    granted,
    new_session,
    opened,
    output,
    running,
    state_of,
    submitted,
)

HOUR = timedelta(hours=1)
NOTHING = timedelta(0)


async def _ended(store: Store, **fields: object) -> GenerationRecord:
    record = await running(store, **fields)
    end = finish_of(record, output=output(3), output_tokens=3, matched_stop="é\n", finish_reason=FinishReason.STOP)
    [result] = await store.finish_many([end], now=NOW)
    assert result.record is not None
    return result.record


async def test_a_generation_is_stored_unless_its_caller_says_otherwise(store: Store) -> None:
    assert (await submitted(store)).is_stored
    unstored = await submitted(store, is_stored=False)
    assert not unstored.is_stored
    assert await state_of(store, unstored) == unstored
    [summary] = await store.list_page(unstored.tenant_id, states=(), before=None, limit=1)
    assert not summary.is_stored


async def test_only_what_ended_and_is_not_stored_is_found(store: Store) -> None:
    await _ended(store)
    await running(store, is_stored=False)
    first, second = [await _ended(store, is_stored=False, grace=grace) for grace in (HOUR, None)]
    page = await store.unstored_page(after=None, kept=HOUR, limit=10, now=NOW + HOUR)
    assert [(it.generation_id, it.grace, it.finished_at) for it in page] == [
        (first.generation_id, HOUR, NOW),
        (second.generation_id, None, NOW),
    ]
    assert await store.unstored_page(after=None, kept=HOUR, limit=10, now=NOW + HOUR - timedelta(seconds=1)) == []
    assert await store.unstored_page(after=None, kept=NOTHING, limit=1, now=NOW) == page[:1]
    assert await store.unstored_page(after=first.generation_id, kept=NOTHING, limit=10, now=NOW) == page[1:]


async def test_deleting_texts_leaves_the_record_its_counts_and_its_ledger_row(store: Store) -> None:
    ended = await _ended(store, is_stored=False)
    assert await store.delete_texts_many([ended.generation_id], now=NOW + HOUR) == 1
    after = await state_of(store, ended)
    assert (after.prompt_token_ids, after.sampling.stop, after.matched_stop) == ((), (), None)
    assert (after.num_prompt_tokens, after.output_tokens) == (ended.num_prompt_tokens, 3)
    assert (after.state, after.texts_deleted_at) == (State.SUCCEEDED, NOW + HOUR)
    assert await store.read_output_many([ended.generation_id]) == [None]
    [ledger] = await store.ledger_of(ended.generation_id)
    assert (ledger.prompt_tokens, ledger.output_tokens) == (ended.num_prompt_tokens, 3)
    [summary] = await store.list_page(ended.tenant_id, states=(), before=None, limit=1)
    assert (summary.num_prompt_tokens, summary.texts_deleted_at) == (ended.num_prompt_tokens, NOW + HOUR)
    assert await store.unstored_page(after=None, kept=NOTHING, limit=10, now=NOW + HOUR) == []
    assert await store.delete_texts_many([ended.generation_id], now=NOW + 2 * HOUR) == 0
    assert await state_of(store, ended) == after


async def test_texts_of_a_stored_or_a_live_generation_are_never_deleted(store: Store) -> None:
    stored, live = await _ended(store), await running(store, is_stored=False)
    assert await store.delete_texts_many([stored.generation_id, live.generation_id], now=NOW) == 0
    assert await state_of(store, stored) == stored
    assert await state_of(store, live) == live
    assert await store.read_output_many([stored.generation_id]) == [output(3)]


async def test_those_that_have_ended_are_told_from_the_others(store: Store) -> None:
    ended, live, other = await _ended(store), await running(store), await _ended(store, is_stored=False)
    ids = [record.generation_id for record in (other, live, ended)]
    assert await store.ended_many([*ids, new_generation_id(), GenerationId("nonsense")]) == sorted(
        [ended.generation_id, other.generation_id]
    )


async def test_sessions_that_are_over_are_pruned_when_their_time_is_over_and_no_row_names_them(store: Store) -> None:
    lost, live, named = [await opened(store) for _ in range(3)]
    orphan = await granted(store, await submitted(store), named)
    await store.request_cancel_many([(orphan.generation_id, CancelCause.CLIENT)])
    await store.lose_session(lost, 1)
    await store.lose_session(named, 1)  # its generation is to be ended, so it stays RUNNING
    over = NOW + LEASE + HOUR
    assert await store.prune_sessions(kept=HOUR, limit=10, now=over - timedelta(seconds=1)) == 0
    assert await store.prune_sessions(kept=HOUR, limit=10, now=over) == 1
    left = [session.session_id for session in await store.list_sessions(include_over=True)]
    assert sorted(left) == sorted([live, named])
    [result] = await store.finish_many([finish_of(orphan, state=State.CANCELLED, finish_reason=None)], now=NOW)
    assert result.record is not None
    assert await store.prune_sessions(kept=HOUR, limit=10, now=over) == 1


async def test_sessions_are_pruned_in_batches(store: Store) -> None:
    for _ in range(3):
        session = new_session()
        await store.open_session(session, lease=LEASE, now=NOW)
        await store.end_session(session.session_id, 1)
    assert [await store.prune_sessions(kept=NOTHING, limit=2, now=NOW + LEASE) for _ in range(3)] == [2, 1, 0]
