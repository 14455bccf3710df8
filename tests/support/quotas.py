"""Quotas to test against: the memory twin, and real Valkey."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from redis.asyncio import Redis

from service_kit.ids import GenerationId, KeyId, TenantId, new_generation_id
from state_store.delta_log.connection import connect_redis
from state_store.quota.memory import MemoryQuota, MemoryQuotaData
from state_store.quota.port import QuotaCharge, QuotaKind, QuotaScope, QuotaSettlement, QuotaStanding, QuotaSubject
from state_store.quota.redis_quota import RedisQuota
from state_store.quota.settings import QuotaSettings
from state_store.tenants import UNLIMITED, QuotaLimits
from tests.support.clock import SteppedClock
from tests.support.delta_logs import database_url

QUOTA_DATABASE = 8
START = datetime(2030, 1, 30, 12, 0, 0, 250_000, tzinfo=UTC)
TENANT, KEY = TenantId("tenant-é"), KeyId("key:{a}")
_MEASURED = QuotaLimits(**dict.fromkeys([kind.value for kind in QuotaKind], 1_000_000_000))

Quota = MemoryQuota | RedisQuota


@dataclass(kw_only=True)
class QuotaUnderTest:
    """Two adapters over one state; `redis` is None for the twin."""

    quota: Quota
    other: Quota
    clock: SteppedClock
    redis: Redis | None = None

    async def lose_all(self) -> None:
        if self.redis is not None:
            await self.redis.flushdb()
        elif isinstance(self.quota, MemoryQuota):
            self.quota.lose_all()

    async def end_hold_of_rebuild(self) -> None:
        """As if the one who rebuilds had paused for too long."""
        if self.redis is not None:
            for key in await self.redis.keys("*:rebuild"):
                await self.redis.pexpire(key, 1)
        self.clock.advance(QuotaSettings().rebuild_hold)

    async def make_ready(self) -> None:
        assert await self.quota.begin_rebuild()
        await self.quota.mark_ready()

    async def used(self, tenant_id: TenantId = TENANT, key_id: KeyId = KEY) -> dict[tuple[QuotaScope, QuotaKind], int]:
        """What every limit would count."""
        subject = subject_of(tenant_id=tenant_id, key_id=key_id, tenant=_MEASURED, key=_MEASURED)
        return {(each.scope, each.kind): each.limit - each.remaining for each in await self.quota.look(subject)}

    async def used_by_tenant(self) -> list[int]:
        """Requests and tokens of the last minute, live ones, tokens of the day and of the month."""
        used = await self.used()
        assert [used[QuotaScope.KEY, kind] for kind in QuotaKind] == [
            used[QuotaScope.TENANT, kind] for kind in QuotaKind
        ]
        return [used[QuotaScope.TENANT, kind] for kind in QuotaKind]

    def charge(
        self,
        tokens: int = 10,
        *,
        generation_id: GenerationId | None = None,
        tenant_id: TenantId = TENANT,
        key_id: KeyId = KEY,
    ) -> QuotaCharge:
        """Of a generation that is made now."""
        return QuotaCharge(
            generation_id=generation_id or generation_id_at(self.clock()),
            tenant_id=tenant_id,
            key_id=key_id,
            prompt_tokens=1,
            max_output_tokens=tokens - 1,
        )


def memory_quota(clock: SteppedClock) -> QuotaUnderTest:
    data = MemoryQuotaData()
    return QuotaUnderTest(quota=MemoryQuota(clock, data=data), other=MemoryQuota(clock, data=data), clock=clock)


@asynccontextmanager
async def valkey_quota(url: str, clock: SteppedClock) -> AsyncIterator[QuotaUnderTest]:
    """In an emptied database; lists take several calls."""
    settings = QuotaSettings(max_items_per_call=3)
    client = connect_redis(database_url(url, QUOTA_DATABASE))
    try:
        await client.flushdb()
        quota, other = (RedisQuota(client, clock=clock, settings=settings) for _ in range(2))
        yield QuotaUnderTest(quota=quota, other=other, clock=clock, redis=client)
    finally:
        await client.aclose()


def generation_id_at(at: datetime) -> GenerationId:
    """An id as it would have been made then."""
    milliseconds = (at - datetime.fromtimestamp(0, UTC)) // timedelta(milliseconds=1)
    digits = f"{milliseconds:012x}"
    return GenerationId(f"{digits[:8]}-{digits[8:]}{new_generation_id()[13:]}")


def subject_of(
    *,
    tenant: QuotaLimits = UNLIMITED,
    key: QuotaLimits = UNLIMITED,
    tenant_id: TenantId = TENANT,
    key_id: KeyId = KEY,
) -> QuotaSubject:
    return QuotaSubject(tenant_id=tenant_id, key_id=key_id, tenant_limits=tenant, key_limits=key)


def limited(scope: QuotaScope, kind: QuotaKind, limit: int) -> QuotaSubject:
    """One limit and no other."""
    limits = replace(UNLIMITED, **{kind.value: limit})
    return subject_of(tenant=limits) if scope is QuotaScope.TENANT else subject_of(key=limits)


def settlement_of(charge: QuotaCharge, used_tokens: int) -> QuotaSettlement:
    return QuotaSettlement(
        generation_id=charge.generation_id,
        tenant_id=charge.tenant_id,
        key_id=charge.key_id,
        used_tokens=used_tokens,
    )


def standing(scope: QuotaScope, kind: QuotaKind, limit: int, remaining: int, reset_ms: int) -> QuotaStanding:
    return QuotaStanding(
        scope=scope, kind=kind, limit=limit, remaining=remaining, reset=timedelta(milliseconds=reset_ms)
    )
