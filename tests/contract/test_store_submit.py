import asyncio
from dataclasses import replace
from datetime import timedelta

from service_kit.errors import Reason
from service_kit.ids import GenerationId, RequestId, TenantId
from state_store.model import State
from state_store.ports import SubmitKind
from tests.support.generations import NOW, Store, end_of_queued, new_generation, state_of, submitted

KEPT = timedelta(hours=24)


async def test_a_submitted_generation_is_queued_with_every_field_as_given(store: Store) -> None:
    item = new_generation(prompt_token_ids=tuple(range(2000)))
    [result] = await store.submit_many([item], now=NOW)
    record = result.record
    assert (result.kind, record.state, record.attempt) == (SubmitKind.CREATED, State.QUEUED, 0)
    assert (record.prompt_token_ids, record.sampling, record.grace) == (
        item.prompt_token_ids,
        item.sampling,
        item.grace,
    )
    assert record.created_at == NOW
    assert record.queue_deadline_at == NOW + item.queue_timeout
    assert record.deadline_at == NOW + timedelta(seconds=600)
    assert await store.get_many([item.generation_id, GenerationId("unknown")]) == [record, None]
    assert await store.find_by_request_id(item.tenant_id, item.request_id) == record


async def test_no_grace_limit_and_no_deadline_are_kept_as_none(store: Store) -> None:
    record = await submitted(store, grace=None, deadline=None)
    stored = await state_of(store, record)
    assert (stored.grace, stored.deadline_at) == (None, None)


async def test_the_same_request_id_with_the_same_hash_attaches(store: Store) -> None:
    first = new_generation()
    await store.submit_many([first], now=NOW)
    [again] = await store.submit_many([new_generation(request_id=first.request_id)], now=NOW)
    assert again.kind is SubmitKind.EXISTING
    assert again.record.generation_id == first.generation_id


async def test_the_same_request_id_with_another_hash_is_a_conflict_and_writes_nothing(store: Store) -> None:
    first = new_generation()
    other = new_generation(request_id=first.request_id, request_hash=b"other")
    await store.submit_many([first], now=NOW)
    [result] = await store.submit_many([other], now=NOW)
    assert (result.kind, result.record.generation_id) == (SubmitKind.CONFLICT, first.generation_id)
    assert await store.get_many([other.generation_id]) == [None]


async def test_a_request_id_belongs_to_its_tenant_alone(store: Store) -> None:
    first = new_generation()
    other = new_generation(request_id=first.request_id, tenant_id=TenantId("tenant-b"), request_hash=b"other")
    results = await store.submit_many([first, other], now=NOW)
    assert [result.kind for result in results] == [SubmitKind.CREATED, SubmitKind.CREATED]
    assert await store.find_by_request_id(TenantId("tenant-c"), first.request_id) is None


async def test_in_one_batch_the_first_item_of_a_request_id_decides(store: Store) -> None:
    first = new_generation()
    batch = [
        new_generation(),
        first,
        new_generation(request_id=first.request_id),
        new_generation(request_id=first.request_id, request_hash=b"other"),
        new_generation(),
    ]
    results = await store.submit_many(batch, now=NOW)
    assert [result.kind for result in results] == [
        SubmitKind.CREATED,
        SubmitKind.CREATED,
        SubmitKind.EXISTING,
        SubmitKind.CONFLICT,
        SubmitKind.CREATED,
    ]
    assert {results[index].record.generation_id for index in (1, 2, 3)} == {first.generation_id}


async def test_a_generation_id_that_is_taken_is_a_conflict_and_leaves_the_batch_alone(store: Store) -> None:
    first = new_generation()
    await store.submit_many([first], now=NOW)
    thief = replace(new_generation(), generation_id=first.generation_id)
    results = await store.submit_many([thief, new_generation()], now=NOW)
    assert [result.kind for result in results] == [SubmitKind.CONFLICT, SubmitKind.CREATED]
    assert await store.find_by_request_id(thief.tenant_id, thief.request_id) is None


async def test_concurrent_submits_of_one_request_id_create_one_generation(store: Store) -> None:
    keys = [RequestId(f"shared-{number}") for number in range(6)]
    batches = [[new_generation(request_id=key) for key in (keys if turn % 2 else keys[::-1])] for turn in range(8)]
    answers = await asyncio.gather(*(store.submit_many(batch, now=NOW) for batch in batches))
    results = [result for batch in answers for result in batch]
    assert sum(result.kind is SubmitKind.CREATED for result in results) == len(keys)
    assert {result.kind for result in results} == {SubmitKind.CREATED, SubmitKind.EXISTING}
    assert len({result.record.generation_id for result in results}) == len(keys)


async def test_concurrent_submits_with_different_hashes_create_one_and_refuse_the_other(store: Store) -> None:
    batches = [[new_generation(request_id=RequestId("shared"), request_hash=bytes([turn]))] for turn in range(6)]
    answers = await asyncio.gather(*(store.submit_many(batch, now=NOW) for batch in batches))
    kinds = sorted(result.kind for [result] in answers)
    assert kinds == [SubmitKind.CONFLICT] * 5 + [SubmitKind.CREATED]


async def test_a_request_id_is_kept_for_a_day_after_the_end_and_then_free(store: Store) -> None:
    record = await submitted(store)
    again = new_generation(request_id=record.request_id, request_hash=b"other")
    await store.finish_many([end_of_queued(record)], now=NOW)
    [kept] = await store.submit_many([again], now=NOW + KEPT)
    [free] = await store.submit_many([again], now=NOW + KEPT + timedelta(seconds=1))
    assert (kept.kind, free.kind) == (SubmitKind.CONFLICT, SubmitKind.CREATED)
    assert await store.find_by_request_id(again.tenant_id, again.request_id) == free.record


async def test_a_request_id_never_expires_while_its_generation_lives(store: Store) -> None:
    record = await submitted(store)
    assert await store.prune_request_keys(limit=10, now=NOW + timedelta(days=400)) == 0
    [again] = await store.submit_many([new_generation(request_id=record.request_id)], now=NOW + timedelta(days=400))
    assert again.kind is SubmitKind.EXISTING


async def test_pruning_deletes_expired_request_ids_up_to_the_limit(store: Store) -> None:
    records = [await submitted(store) for _ in range(3)]
    await store.finish_many([end_of_queued(record) for record in records], now=NOW)
    assert await store.prune_request_keys(limit=10, now=NOW + KEPT) == 0
    later = NOW + KEPT + timedelta(seconds=1)
    assert await store.prune_request_keys(limit=2, now=later) == 2
    assert await store.prune_request_keys(limit=2, now=later) == 1


async def test_an_old_end_does_not_expire_the_request_id_of_a_newer_generation(store: Store) -> None:
    old = await submitted(store)
    await store.finish_many([end_of_queued(old)], now=NOW)
    later = NOW + KEPT + timedelta(seconds=1)
    await store.submit_many([new_generation(request_id=old.request_id)], now=later)
    await store.finish_many([end_of_queued(old, error_reason=Reason.DEADLINE)], now=later)
    assert await store.prune_request_keys(limit=10, now=later + timedelta(days=3)) == 0


async def test_a_request_id_that_no_store_can_hold_names_nothing(store: Store) -> None:
    assert await store.find_by_request_id(TenantId("tenant-a"), RequestId("a\x00b")) is None


async def test_attaching_finds_what_a_submit_would_find_and_writes_nothing(store: Store) -> None:
    known = new_generation()
    await store.submit_many([known], now=NOW)
    again = new_generation(request_id=known.request_id)
    other_hash = replace(again, request_hash=b"other")
    same_id = new_generation(generation_id=known.generation_id)
    fresh = new_generation()
    found = await store.attach_many([again, other_hash, same_id, fresh], now=NOW)
    assert [result.kind if result is not None else None for result in found] == [
        SubmitKind.EXISTING,
        SubmitKind.CONFLICT,
        SubmitKind.CONFLICT,
        None,
    ]
    assert all(result is None or result.record.generation_id == known.generation_id for result in found)
    assert await store.get_many([fresh.generation_id]) == [None]
    assert await store.attach_many([]) == []


async def test_an_expired_request_id_attaches_to_nothing(store: Store) -> None:
    known = await submitted(store)
    await store.finish_many([end_of_queued(known)], now=NOW)
    again = new_generation(request_id=known.request_id)
    later = NOW + timedelta(hours=25)
    assert await store.attach_many([again], now=later) == [None]
