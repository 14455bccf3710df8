"""Exactly one ledger row for each generation that ended, and sums over them, on both adapters."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import groupby, product

import pytest

from service_kit.errors import Reason
from service_kit.ids import KeyId, TenantId
from service_kit.sampling import FinishReason
from state_store.model import CancelCause, Finish, GenerationRecord, LedgerRow, PriorityClass, State
from state_store.ports import AttemptRef, ChunkWrite, FinishKind
from state_store.tenant_store import UsageDimension, UsageQuery, UsageRow
from tests.support.generations import (
    NOW,
    Store,
    end_of_queued,
    finish_of,
    granted,
    opened,
    output,
    requeued,
    running,
    state_of,
    submitted,
)

DAY = timedelta(days=1)
EVERYTHING = UsageQuery(tenant_id=None, since=NOW - 365 * DAY, until=NOW + 365 * DAY, group_by=())


def end_of_running(record: GenerationRecord, state: State, tokens: int, **fields) -> Finish:
    delta = output(tokens) if tokens else None
    given = {"state": state, "output": delta, "output_tokens": tokens, "finish_reason": None, **fields}
    return finish_of(record, **given)


async def succeeded(store: Store) -> list[Finish]:
    return [end_of_running(await running(store), State.SUCCEEDED, 5, cached_prompt_tokens=2)]


async def cancelled_while_queued(store: Store) -> list[Finish]:
    return [end_of_queued(await submitted(store))]


async def cancelled_with_output(store: Store) -> list[Finish]:
    record = await running(store)
    await store.request_cancel_many([(record.generation_id, CancelCause.CLIENT)])
    return [end_of_running(record, State.CANCELLED, 5, finish_reason=FinishReason.CANCELLED)]


async def failed_after_output(store: Store) -> list[Finish]:
    return [end_of_running(await running(store), State.FAILED, 5, error_reason=Reason.ENGINE_FAILURE)]


async def expired_while_queued(store: Store) -> list[Finish]:
    record = await submitted(store)
    await store.request_cancel_many([(record.generation_id, CancelCause.QUEUE_TIMEOUT)])
    return [end_of_queued(record, state=State.EXPIRED, error_reason=Reason.QUEUE_TIMEOUT)]


async def expired_with_output(store: Store) -> list[Finish]:
    record = await running(store)
    await store.request_cancel_many([(record.generation_id, CancelCause.DEADLINE)])
    return [end_of_running(record, State.EXPIRED, 5, error_reason=Reason.DEADLINE)]


async def retried_after_its_worker_was_lost(store: Store) -> list[Finish]:
    """The output of the first attempt is charged once, with that of the second."""
    lost = await running(store)
    again = await granted(store, await requeued(store, lost), await opened(store))
    first = ChunkWrite(generation_id=again.generation_id, attempt=again.attempt, output=output(3))
    assert await store.store_chunks_many([first]) == [True]
    # What the lost worker's coordinator still believes is refused, whenever it comes.
    return [end_of_running(again, State.SUCCEEDED, 5), end_of_running(lost, State.SUCCEEDED, 3)]


async def given_up_with_output(store: Store) -> list[Finish]:
    queued = await requeued(store, await running(store))
    delta = output(5)
    return [
        end_of_queued(queued, state=State.FAILED, error_reason=Reason.ATTEMPTS_EXHAUSTED, output=delta, output_tokens=5)
    ]


async def ended_by_two_coordinators_in_two_ways(store: Store) -> list[Finish]:
    record = await running(store)
    return [
        end_of_running(record, State.SUCCEEDED, 5),
        end_of_running(record, State.CANCELLED, 4, finish_reason=FinishReason.CANCELLED),
    ]


LIVES: list[Callable[[Store], Awaitable[list[Finish]]]] = [
    succeeded,
    cancelled_while_queued,
    cancelled_with_output,
    failed_after_output,
    expired_while_queued,
    expired_with_output,
    retried_after_its_worker_was_lost,
    given_up_with_output,
    ended_by_two_coordinators_in_two_ways,
]


async def row_of(store: Store, record: GenerationRecord) -> LedgerRow:
    [row] = await store.ledger_of(record.generation_id)
    return row


@pytest.mark.parametrize("live", LIVES, ids=lambda it: it.__name__)
async def test_an_end_is_charged_once_however_often_it_is_told(
    store: Store, live: Callable[[Store], Awaitable[list[Finish]]]
) -> None:
    ends = await live(store)
    # Two coordinators at once, each with every end that somebody believes in, in both orders; then once more.
    batches = [ends, ends[::-1], ends]
    answers = [*await asyncio.gather(*(store.finish_many(batch, now=NOW) for batch in batches[:2]))]
    answers.append(await store.finish_many(batches[2], now=NOW + DAY))
    kinds = [result.kind for answer in answers for result in answer]
    assert kinds.count(FinishKind.FINISHED) == 1
    assert set(kinds) <= {FinishKind.FINISHED, FinishKind.ALREADY_FINISHED, FinishKind.STALE}
    [record] = await store.get_many([ends[0].generation_id])
    assert record is not None
    row = await row_of(store, record)
    expected = next(it for it in ends if it.state is record.state)
    assert (row.state, row.output_tokens) == (expected.state, expected.output_tokens)
    assert (row.prompt_tokens, row.cached_prompt_tokens) == (record.num_prompt_tokens, expected.cached_prompt_tokens)
    assert (row.output_tokens, row.finished_at) == (record.output_tokens, NOW)
    [total] = await store.usage(EVERYTHING)
    assert total == UsageRow(
        group=(),
        generations=1,
        prompt_tokens=row.prompt_tokens,
        cached_prompt_tokens=row.cached_prompt_tokens,
        output_tokens=row.output_tokens,
    )


async def test_what_has_not_ended_is_not_charged(store: Store) -> None:
    queued, run, lost = await submitted(store), await running(store), await running(store)
    await requeued(store, lost)
    await store.request_cancel_many([(run.generation_id, CancelCause.CLIENT)])
    for record in (queued, run, lost):
        assert await store.ledger_of(record.generation_id) == []
    [total] = await store.usage(EVERYTHING)
    assert total.generations == 0


async def test_a_refused_end_charges_nothing_and_its_neighbours_are_charged(store: Store) -> None:
    short, good = await running(store), await running(store)
    await store.finish_many([replace(end_of_running(short, State.SUCCEEDED, 5), output_tokens=6)])
    [stale, done] = await store.finish_many(
        [
            replace(end_of_running(short, State.SUCCEEDED, 5), attempt=2),
            end_of_running(good, State.SUCCEEDED, 5),
        ]
    )
    assert (stale.kind, done.kind) == (FinishKind.STALE, FinishKind.FINISHED)
    assert await store.ledger_of(short.generation_id) == []
    assert (await row_of(store, good)).output_tokens == 5


async def test_a_loss_between_two_ends_does_not_charge_twice(store: Store) -> None:
    record = await running(store)
    [first], _ = await asyncio.gather(
        store.finish_many([end_of_running(record, State.SUCCEEDED, 5)], now=NOW),
        store.requeue_many([AttemptRef(generation_id=record.generation_id, attempt=record.attempt)], now=NOW),
    )
    if first.kind is FinishKind.STALE:
        again = await granted(store, await state_of(store, record), await opened(store))
        [second] = await store.finish_many([end_of_running(again, State.SUCCEEDED, 5)], now=NOW)
        assert second.kind is FinishKind.FINISHED
    assert (await row_of(store, record)).output_tokens == 5


async def fill(store: Store) -> list[LedgerRow]:
    """Ended generations of several tenants, keys, models, classes, states and days."""
    rows = []
    kinds = product(("t1", "t2"), ("k1", "k2"), (PriorityClass.BATCH, PriorityClass.STANDARD), (0, 1))
    for number, (tenant, key, priority, age) in enumerate(kinds):
        fields = {"tenant_id": TenantId(tenant), "key_id": KeyId(key), "priority_class": priority}
        record = await running(store, **fields) if number % 3 else await submitted(store, **fields)
        end = (
            end_of_running(record, State.SUCCEEDED, number + 1, cached_prompt_tokens=number % 2)
            if number % 3
            else end_of_queued(record)
        )
        await store.finish_many([end], now=NOW - age * DAY)
        rows.append(await row_of(store, record))
    return rows


VALUES: dict[UsageDimension, Callable[[LedgerRow], str]] = {
    UsageDimension.TENANT: lambda row: row.tenant_id,
    UsageDimension.KEY: lambda row: row.key_id,
    UsageDimension.MODEL: lambda row: row.model,
    UsageDimension.CLASS: lambda row: row.priority_class.value,
    UsageDimension.STATE: lambda row: row.state.value,
    UsageDimension.DAY: lambda row: f"{row.finished_at:%Y-%m-%d}",
}


def summed(rows: list[LedgerRow], dimensions: tuple[UsageDimension, ...]) -> list[UsageRow]:
    def group_of(row: LedgerRow) -> tuple[str, ...]:
        return tuple(VALUES[dimension](row) for dimension in dimensions)

    groups = [(group, list(members)) for group, members in groupby(sorted(rows, key=group_of), key=group_of)]
    return [
        UsageRow(
            group=group,
            generations=len(members),
            prompt_tokens=sum(row.prompt_tokens for row in members),
            cached_prompt_tokens=sum(row.cached_prompt_tokens for row in members),
            output_tokens=sum(row.output_tokens for row in members),
        )
        for group, members in groups
    ]


async def test_usage_equals_the_ledger_by_every_dimension_and_in_every_order(store: Store) -> None:
    rows = await fill(store)
    orders = [(), *((dimension,) for dimension in UsageDimension), tuple(UsageDimension), tuple(UsageDimension)[::-1]]
    for dimensions in orders:
        found = await store.usage(replace(EVERYTHING, group_by=dimensions))
        assert found == summed(rows, dimensions), dimensions
    query = replace(EVERYTHING, tenant_id=TenantId("t1"), group_by=(UsageDimension.KEY, UsageDimension.DAY))
    of_tenant = [row for row in rows if row.tenant_id == "t1"]
    assert await store.usage(query) == summed(of_tenant, query.group_by)


async def test_usage_begins_with_since_and_ends_before_until(store: Store) -> None:
    record = await submitted(store)
    await store.finish_many([end_of_queued(record)], now=NOW)
    tick = timedelta(microseconds=1)
    for since, until, found in ((NOW, NOW + tick, 1), (NOW + tick, NOW + DAY, 0), (NOW - DAY, NOW, 0)):
        [total] = await store.usage(replace(EVERYTHING, since=since, until=until))
        assert total.generations == found
    empty = replace(EVERYTHING, tenant_id=TenantId("nobody"))
    assert await store.usage(empty) == [
        UsageRow(group=(), generations=0, prompt_tokens=0, cached_prompt_tokens=0, output_tokens=0)
    ]
    assert await store.usage(replace(empty, group_by=(UsageDimension.TENANT,))) == []


async def test_a_day_is_that_of_utc(store: Store) -> None:
    midnight = datetime(2026, 3, 1, tzinfo=UTC)
    for at in (midnight - timedelta(microseconds=1), midnight):
        await store.finish_many([end_of_queued(await submitted(store))], now=at)
    query = UsageQuery(tenant_id=None, since=midnight - DAY, until=midnight + DAY, group_by=(UsageDimension.DAY,))
    assert [row.group for row in await store.usage(query)] == [("2026-02-28",), ("2026-03-01",)]
