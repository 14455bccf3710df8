"""Reservations against rows, and counts rebuilt from rows: over the twins, and over real Postgres and Valkey."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
import pytest_asyncio

from scheduler.quota_upkeep import QuotaReaper
from service_kit.ids import GenerationId, KeyId, TenantId
from sluice.local.valkey import LocalValkey
from state_store.memory.store import MemoryStore
from state_store.model import GenerationRecord, State
from state_store.quota.errors import QuotaNotReadyError
from state_store.quota.memory import MemoryQuota
from state_store.quota.port import QuotaCharge
from state_store.quota.records import QuotaRecord, QuotaUse
from tests.support.clock import SteppedClock
from tests.support.generations import TENANT, finish_of, granted, new_generation, opened, output
from tests.support.polling import eventually_answers
from tests.support.quotas import QuotaUnderTest, generation_id_at, memory_quota, settlement_of, subject_of, valkey_quota

NOON = datetime.now(UTC).replace(day=15, hour=12, minute=0, second=30, microsecond=250_000)
KEY, OTHER_KEY = KeyId("key-a"), KeyId("key-b")
SECOND = timedelta(seconds=1)
FREE = subject_of(tenant_id=TENANT, key_id=KEY)


class RecordsAt:
    """QuotaRecords at the time of the test; `meanwhile` happens behind each reading of what counts."""

    def __init__(self, store: Any, clock: SteppedClock) -> None:
        self.store = store
        self.clock = clock
        self.meanwhile: Callable[[], Awaitable[None]] | None = None

    async def quota_records(self, generation_ids: Sequence[GenerationId]) -> list[QuotaRecord | None]:
        return cast("list[QuotaRecord | None]", await self.store.quota_records(generation_ids))

    async def live_charges_page(self, *, after: GenerationId | None, limit: int) -> list[QuotaCharge]:
        return cast("list[QuotaCharge]", await self.store.live_charges_page(after=after, limit=min(limit, 2)))

    async def quota_use(self, *, now: datetime | None = None) -> QuotaUse:
        use = cast("QuotaUse", await self.store.quota_use(now=now or self.clock()))
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            await meanwhile()
        return use


@dataclass(kw_only=True)
class UpkeepRig:
    """Two reapers over one store and one server."""

    quotas: QuotaUnderTest
    records: RecordsAt
    reapers: tuple[QuotaReaper, QuotaReaper]

    @property
    def clock(self) -> SteppedClock:
        return self.quotas.clock

    async def round(self) -> None:
        await asyncio.gather(*(reaper.run_once() for reaper in self.reapers))

    def charge(self, **fields: Any) -> QuotaCharge:
        """As of `made`: 3 prompt tokens, at most 8 of output."""
        names = {"tenant_id": TENANT, "key_id": KEY} | fields
        charge = self.quotas.charge(11, generation_id=generation_id_at(self.clock()), **names)
        return replace(charge, prompt_tokens=3, max_output_tokens=8)

    async def commit(self, charge: QuotaCharge) -> GenerationRecord:
        new = new_generation(generation_id=charge.generation_id, tenant_id=charge.tenant_id, key_id=charge.key_id)
        [result] = await self.records.store.submit_many([new], now=self.clock())
        return cast("GenerationRecord", result.record)

    async def end(self, record: GenerationRecord, output_tokens: int) -> None:
        running = await granted(self.records.store, record, await opened(self.records.store))
        finish = finish_of(running, output=output(output_tokens), output_tokens=output_tokens)
        await self.records.store.finish_many([finish], now=self.clock())

    async def used(self, key_id: KeyId = KEY, tenant_id: TenantId = TENANT) -> list[int]:
        """Of the tenant, then of the key: requests, tokens, live ones, tokens of day and month."""
        return list((await self.quotas.used(tenant_id, key_id)).values())


@pytest_asyncio.fixture
async def rig(store: Any, valkey_server: LocalValkey) -> AsyncIterator[UpkeepRig]:
    clock = SteppedClock(NOON)
    async with AsyncExitStack() as stack:
        if isinstance(store, MemoryStore):
            quotas = memory_quota(clock)
        else:
            quotas = await stack.enter_async_context(valkey_quota(valkey_server.url, clock))
        records = RecordsAt(store, clock)
        reapers = [QuotaReaper(quota=quota, upkeep=quota, records=records) for quota in (quotas.quota, quotas.other)]
        rig = UpkeepRig(quotas=quotas, records=records, reapers=(reapers[0], reapers[1]))
        await rig.round()
        yield rig


async def test_a_reservation_that_was_never_committed_is_back_within_10_s(rig: UpkeepRig) -> None:
    await rig.quotas.quota.reserve(rig.charge(), FREE)
    for _ in range(9):
        rig.clock.advance(SECOND)
        await rig.round()
    assert await rig.used() == [0] * 10


async def test_the_reservation_of_a_live_generation_is_never_lost_bound_or_not(rig: UpkeepRig) -> None:
    bound, unbound = rig.charge(), rig.charge()
    for charge in (bound, unbound):
        await rig.quotas.quota.reserve(charge, FREE)
        await rig.commit(charge)
    await rig.quotas.quota.bind_many([bound])
    for seconds in (1, 8, 60, 61, 3600):
        rig.clock.advance(seconds * SECOND)
        await rig.round()
        assert (await rig.used())[2] == 2
    await rig.quotas.quota.release_many([bound, unbound])
    assert (await rig.used())[2] == 2


async def test_an_end_that_could_not_be_settled_is_settled_by_its_row(rig: UpkeepRig) -> None:
    charge = rig.charge()
    await rig.quotas.quota.reserve(charge, FREE)
    record = await rig.commit(charge)
    await rig.quotas.quota.bind_many([charge])
    await rig.end(record, 4)
    rig.clock.advance(15 * SECOND)
    await rig.round()
    assert await rig.used() == [1, 7, 0, 7, 7] * 2


async def test_more_than_a_page_is_compared_in_one_round(rig: UpkeepRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.quota_upkeep.PAGE", 3)
    charges = [rig.charge(tenant_id=TenantId(f"tenant-{number}")) for number in range(8)]
    for charge in charges:
        await rig.quotas.quota.reserve(charge, subject_of(tenant_id=charge.tenant_id))
    rig.clock.advance(9 * SECOND)
    await rig.reapers[0].run_once()
    assert await rig.quotas.quota.due_many(limit=9) == []
    assert (await rig.used(tenant_id=TenantId("tenant-5")))[:5] == [0] * 5


async def _live_and_past_use(rig: UpkeepRig) -> None:
    """Of two keys: ended long ago, ended lately, running and queued; and a reservation that was never committed."""
    rig.clock.advance(timedelta(days=-1))
    for hours, seconds, tokens, key_id in ((24, 0, 1, KEY), (3, 0, 2, KEY), (0, 50, 3, OTHER_KEY), (0, 9, 4, KEY)):
        charge = rig.charge(key_id=key_id)
        await rig.quotas.quota.reserve(charge, subject_of(tenant_id=TENANT, key_id=key_id))
        record = await rig.commit(charge)
        await rig.quotas.quota.bind_many([charge])
        await rig.end(record, tokens)
        await rig.quotas.quota.settle_many([settlement_of(charge, 3 + tokens)])
        rig.clock.advance(timedelta(hours=hours, seconds=seconds))
    for key_id in (KEY, OTHER_KEY, OTHER_KEY):
        charge = rig.charge(key_id=key_id)
        await rig.quotas.quota.reserve(charge, subject_of(tenant_id=TENANT, key_id=key_id))
        record = await rig.commit(charge)
        await rig.quotas.quota.bind_many([charge])
    await granted(rig.records.store, record, await opened(rig.records.store))


async def test_emptied_under_live_and_past_use_the_counts_are_those_before(rig: UpkeepRig) -> None:
    await _live_and_past_use(rig)
    before = [await rig.used(key_id) for key_id in (KEY, OTHER_KEY)]
    assert before[0][:5] == [5, 6 + 7 + 3 * 11, 3, 5 + 6 + 7 + 3 * 11, 4 + 5 + 6 + 7 + 3 * 11]
    await rig.quotas.lose_all()
    await rig.round()
    assert [await rig.used(key_id) for key_id in (KEY, OTHER_KEY)] == before
    for _ in range(3):
        rig.clock.advance(9 * SECOND)
        await rig.round()
    assert [(await rig.used(key_id))[3:5] for key_id in (KEY, OTHER_KEY)] == [row[3:5] for row in before]


async def test_what_was_committed_or_ended_during_the_rebuild_counts_once(rig: UpkeepRig) -> None:
    live, ending = rig.charge(), rig.charge()
    record = await rig.commit(ending)

    async def meanwhile() -> None:
        await rig.commit(live)
        await rig.end(record, 2)

    await rig.quotas.lose_all()
    rig.records.meanwhile = meanwhile
    await rig.reapers[0].run_once()
    assert (await rig.used())[:5] == [2, 22, 2, 22, 22]
    rig.clock.advance(9 * SECOND)
    await rig.round()
    assert (await rig.used())[:5] == [2, 16, 1, 16, 16]


async def test_a_rebuild_that_died_half_way_is_begun_anew_by_another(rig: UpkeepRig) -> None:
    await _live_and_past_use(rig)
    before = await rig.used()
    await rig.quotas.lose_all()
    died = rig.reapers[0]._upkeep
    assert await died.begin_rebuild()
    use = await rig.records.quota_use()
    await died.rebuild(use.live, use.past[:1])
    await rig.reapers[1].run_once()
    assert not await rig.quotas.quota.is_ready()
    await rig.quotas.end_hold_of_rebuild()

    async def is_ready() -> bool:
        await rig.reapers[1].run_once()
        return await rig.quotas.quota.is_ready()

    assert await eventually_answers(is_ready)
    assert (await rig.used())[2:5] == before[2:5]
    with pytest.raises(QuotaNotReadyError):
        await died.rebuild(use.live, use.past)


async def test_of_an_idle_service_no_reservation_key_is_left(rig: UpkeepRig) -> None:
    charges = [rig.charge(tenant_id=TenantId(f"tenant-{number % 9}")) for number in range(40)]
    for number, charge in enumerate(charges):
        await rig.quotas.quota.reserve(charge, subject_of(tenant_id=charge.tenant_id))
        if number % 4 == 0:
            await rig.quotas.quota.release_many([charge])
        elif number % 4 == 1:
            await rig.quotas.quota.settle_many([settlement_of(charge, 5)])
        elif number % 4 == 2:
            await rig.commit(charge)
            finish = finish_of(await _record(rig, charge), state=State.CANCELLED, finish_reason=None)
            await rig.records.store.finish_many([finish], now=rig.clock())
    rig.clock.advance(9 * SECOND)
    await rig.round()
    if rig.quotas.redis is None:
        assert isinstance(rig.quotas.quota, MemoryQuota)
        assert not rig.quotas.quota.has_reservations()
        return
    names = [key.decode().partition("}:")[2] for key in await rig.quotas.redis.keys("*")]
    assert {name.partition(":")[0] for name in names} == {"marker", "settled", "requests", "tokens", "use"}
    kept = [key for key in await rig.quotas.redis.keys("*") if not key.endswith(b"marker")]
    assert all([0 < await rig.quotas.redis.pttl(key) <= 32 * 86_400_000 for key in kept])


async def _record(rig: UpkeepRig, charge: QuotaCharge) -> GenerationRecord:
    [record] = await rig.records.store.get_many([charge.generation_id])
    return cast("GenerationRecord", record)
