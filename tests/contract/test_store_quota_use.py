"""What the store says about quotas, on the memory twin and on real Postgres."""

from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

import pytest

from service_kit.ids import KeyId, TenantId, new_generation_id
from service_kit.sampling import SamplingParams
from state_store.model import GenerationRecord, State
from state_store.ports import SubmitKind
from state_store.quota.port import PastUse, QuotaCharge
from state_store.quota.records import QuotaRecord, QuotaRecords
from tests.support.generations import TENANT, Store, finish_of, granted, new_generation, opened, output
from tests.support.quotas import generation_id_at

KEY = KeyId("key-a")
NOON = datetime.now(UTC).replace(day=15, hour=12, minute=0, second=30, microsecond=250_000)
SECOND = timedelta(seconds=1)


class QuotaStore(Store, QuotaRecords, Protocol):
    """What both adapters are."""


@pytest.fixture
def quota_store(store: Any) -> QuotaStore:
    return store


async def made(store: QuotaStore, at: datetime, **fields: Any) -> GenerationRecord:
    """With 3 prompt and at most 8 output tokens."""
    new = new_generation(generation_id=generation_id_at(at), **fields)
    [result] = await store.submit_many([new], now=at)
    assert result.kind is SubmitKind.CREATED
    return result.record


async def ended(store: QuotaStore, record: GenerationRecord, output_tokens: int, at: datetime) -> GenerationRecord:
    running = await granted(store, record, await opened(store))
    finish = finish_of(running, output=output(output_tokens), output_tokens=output_tokens)
    [result] = await store.finish_many([finish], now=at)
    assert result.record is not None
    return result.record


def charge_of(record: GenerationRecord) -> QuotaCharge:
    return QuotaCharge(
        generation_id=record.generation_id,
        tenant_id=record.tenant_id,
        key_id=record.key_id,
        prompt_tokens=3,
        max_output_tokens=8,
    )


async def test_records_tell_live_from_ended_ones_and_both_from_unknown_ones(quota_store: QuotaStore) -> None:
    queued = await made(quota_store, NOON)
    running = await granted(quota_store, await made(quota_store, NOON), await opened(quota_store))
    done = await ended(quota_store, await made(quota_store, NOON), 4, NOON)
    asked = [running.generation_id, new_generation_id(), done.generation_id, queued.generation_id]
    assert await quota_store.quota_records(asked) == [
        QuotaRecord(charge=charge_of(running), used_tokens=None),
        None,
        QuotaRecord(charge=charge_of(done), used_tokens=7),
        QuotaRecord(charge=charge_of(queued), used_tokens=None),
    ]


async def test_live_charges_come_in_pages_by_id_without_ended_ones(quota_store: QuotaStore) -> None:
    records = [await made(quota_store, NOON + number * SECOND) for number in range(5)]
    await ended(quota_store, records[1], 4, NOON)
    await granted(quota_store, records[3], await opened(quota_store))
    live = [charge_of(records[number]) for number in (0, 2, 3, 4)]
    first = await quota_store.live_charges_page(after=None, limit=3)
    assert first == live[:3]
    assert await quota_store.live_charges_page(after=first[-1].generation_id, limit=3) == live[3:]


async def test_every_generation_is_either_live_or_past(quota_store: QuotaStore) -> None:
    live = [await made(quota_store, NOON - 90 * SECOND), await made(quota_store, NOON)]
    live[1] = await granted(quota_store, live[1], await opened(quota_store))
    just_now = NOON - 2 * SECOND
    for ended_at in (NOON - SECOND, NOON):
        await ended(quota_store, await made(quota_store, just_now), 4, ended_at)
    await ended(quota_store, await made(quota_store, NOON - 50 * SECOND), 1, NOON - 40 * SECOND)
    await ended(quota_store, await made(quota_store, NOON - 300 * SECOND), 2, NOON - SECOND)
    await ended(quota_store, await made(quota_store, NOON - timedelta(hours=3)), 5, NOON - timedelta(hours=2))
    use = await quota_store.quota_use(now=NOON)
    assert sorted(use.live, key=lambda each: each.generation_id) == [charge_of(record) for record in live]
    assert use.past == (
        PastUse(
            tenant_id=TENANT,
            key_id=KEY,
            by_second=(
                (NOON.replace(microsecond=0) - 50 * SECOND, 1, 4),
                (just_now.replace(microsecond=0), 2, 14),
            ),
            day_tokens=14 + 4 + 5 + 8,
            month_tokens=14 + 4 + 5 + 8,
        ),
    )


async def test_days_and_months_are_those_in_which_the_generations_were_made(quota_store: QuotaStore) -> None:
    midnight = NOON.replace(hour=0, minute=0, second=0, microsecond=0)
    now = midnight + timedelta(hours=1)
    yesterday = await made(quota_store, midnight - SECOND)
    await ended(quota_store, yesterday, 1, midnight + SECOND)
    await ended(quota_store, await made(quota_store, midnight - timedelta(hours=5)), 2, now - SECOND)
    await ended(quota_store, await made(quota_store, midnight), 3, now - 40 * SECOND)
    first_of_month = midnight.replace(day=1)
    await ended(quota_store, await made(quota_store, first_of_month), 4, first_of_month + SECOND)
    await ended(quota_store, await made(quota_store, first_of_month - SECOND), 5, first_of_month + SECOND)
    (past,) = (await quota_store.quota_use(now=now)).past
    assert (past.by_second, past.day_tokens, past.month_tokens) == ((), 6, 4 + 5 + 6 + 7)


async def test_keys_are_told_apart_and_every_kind_of_end_counts_what_it_used(quota_store: QuotaStore) -> None:
    theirs = {"tenant_id": TenantId("tenant-b"), "key_id": KeyId("key-b")}
    other_key = KeyId("key-c")
    await ended(quota_store, await made(quota_store, NOON), 4, NOON)
    await ended(quota_store, await made(quota_store, NOON, **theirs), 5, NOON)
    cancelled = await made(quota_store, NOON, key_id=other_key)
    finish = finish_of(cancelled, state=State.CANCELLED, finish_reason=None)
    await quota_store.finish_many([finish], now=NOON)
    use = await quota_store.quota_use(now=NOON)
    assert [(past.tenant_id, past.key_id, past.day_tokens) for past in use.past] == [
        (TENANT, KEY, 7),
        (TENANT, other_key, 3),
        (*theirs.values(), 8),
    ]
    assert [past.by_second[0][1:] for past in use.past] == [(1, 7), (1, 3), (1, 8)]
    assert use.live == ()


async def test_a_long_output_that_may_come_is_charged_as_such(quota_store: QuotaStore) -> None:
    sampling = SamplingParams(max_output_tokens=4_000_000_000)
    await made(quota_store, NOON, sampling=sampling, prompt_token_ids=())
    (charge,) = await quota_store.live_charges_page(after=None, limit=1)
    assert (charge.prompt_tokens, charge.tokens) == (0, 4_000_000_000)
