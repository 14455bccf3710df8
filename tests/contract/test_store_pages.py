from dataclasses import replace
from datetime import timedelta

from service_kit.ids import TenantId
from state_store.model import CancelCause, GenerationSummary, State
from state_store.ports import AttemptRef
from tests.support.generations import NOW, TENANT, Store, end_of_queued, finish_of, granted, opened, running, submitted

MINUTE = timedelta(minutes=1)


def ids(records) -> list[str]:
    return [record.generation_id for record in records]


def summaries(records) -> list[GenerationSummary]:
    return [GenerationSummary.of(record) for record in records]


async def test_a_tenants_list_pages_newest_first_and_filters_by_state(store: Store) -> None:
    records = [await submitted(store) for _ in range(5)]
    await submitted(store, tenant_id=TenantId("tenant-b"))
    await store.finish_many([end_of_queued(records[1])])
    newest_first = ids(records)[::-1]
    first = await store.list_page(TENANT, states=[], before=None, limit=3)
    assert first == summaries(records[:1:-1])
    assert ids(await store.list_page(TENANT, states=[], before=first[-1].generation_id, limit=3)) == newest_first[3:]
    final = await store.list_page(TENANT, states=[State.CANCELLED, State.FAILED], before=None, limit=9)
    assert ids(final) == [records[1].generation_id]
    assert await store.list_page(TENANT, states=[State.RUNNING], before=None, limit=9) == []


async def test_queued_rows_page_by_id_once_they_waited_long_enough(store: Store) -> None:
    records = [await submitted(store) for _ in range(3)]
    await running(store)
    age = timedelta(seconds=2)
    assert await store.queued_page(after=None, min_age=age, limit=9, now=NOW + age - timedelta(microseconds=1)) == []
    first = await store.queued_page(after=None, min_age=age, limit=2, now=NOW + age)
    assert first == summaries(records[:2])
    rest = await store.queued_page(after=first[-1].generation_id, min_age=age, limit=2, now=NOW + age)
    assert rest == summaries(records[2:])


async def test_the_age_of_a_requeued_row_counts_from_the_requeue(store: Store) -> None:
    record = await running(store)
    await store.requeue_many([AttemptRef(generation_id=record.generation_id, attempt=1)], now=NOW + MINUTE)
    age = timedelta(seconds=2)
    assert await store.queued_page(after=None, min_age=age, limit=9, now=NOW + MINUTE) == []
    assert ids(await store.queued_page(after=None, min_age=age, limit=9, now=NOW + MINUTE + age)) == ids([record])


async def test_overdue_rows_are_those_past_their_deadline_or_ungranted_past_their_queue_timeout(store: Store) -> None:
    waiting = await submitted(store, queue_timeout=MINUTE, deadline=None)
    late = await submitted(store, queue_timeout=10 * MINUTE, deadline=MINUTE)
    cancelled = await submitted(store, queue_timeout=MINUTE)
    started = await running(store, queue_timeout=MINUTE, deadline=5 * MINUTE)
    requeued = await running(store, queue_timeout=MINUTE, deadline=None)
    await store.requeue_many([AttemptRef(generation_id=requeued.generation_id, attempt=1)])
    over = await submitted(store, queue_timeout=MINUTE)
    await store.finish_many([end_of_queued(over)])
    await store.request_cancel_many([(cancelled.generation_id, CancelCause.CLIENT)])
    assert await store.overdue_page(after=None, limit=9, now=NOW + MINUTE - timedelta(seconds=1)) == []
    expected = [(waiting.generation_id, CancelCause.QUEUE_TIMEOUT), (late.generation_id, CancelCause.DEADLINE)]
    assert await store.overdue_page(after=None, limit=9, now=NOW + MINUTE) == expected
    assert await store.overdue_page(after=None, limit=1, now=NOW + MINUTE) == expected[:1]
    assert await store.overdue_page(after=waiting.generation_id, limit=1, now=NOW + MINUTE) == expected[1:]
    later = await store.overdue_page(after=late.generation_id, limit=9, now=NOW + 5 * MINUTE)
    assert later == [(started.generation_id, CancelCause.DEADLINE)]


async def test_queued_rows_with_a_cancel_cause_page_by_id(store: Store) -> None:
    records = [await submitted(store) for _ in range(3)]
    started = await running(store)
    targets = [*records[:2], started]
    await store.request_cancel_many([(record.generation_id, CancelCause.CLIENT) for record in targets])
    expected = summaries([replace(record, cancel_cause=CancelCause.CLIENT) for record in records[:2]])
    assert await store.cancelled_queued_page(after=None, limit=9) == expected
    assert await store.cancelled_queued_page(after=None, limit=1) == expected[:1]
    assert await store.cancelled_queued_page(after=records[0].generation_id, limit=9) == expected[1:]


async def test_rows_that_nobody_may_watch_are_live_with_grace_and_without_a_cause(store: Store) -> None:
    queued = await submitted(store, grace=timedelta(0))
    await submitted(store, grace=None)
    cancelled = await submitted(store)
    await store.request_cancel_many([(cancelled.generation_id, CancelCause.CLIENT)])
    started = await granted(store, await submitted(store, grace=MINUTE), await opened(store))
    over = await running(store)
    await store.finish_many([finish_of(over)])
    expected = [(queued.generation_id, timedelta(0)), (started.generation_id, MINUTE)]
    assert await store.unwatchable_page(after=None, limit=9) == expected
    assert await store.unwatchable_page(after=None, limit=1) == expected[:1]
    assert await store.unwatchable_page(after=queued.generation_id, limit=9) == expected[1:]
