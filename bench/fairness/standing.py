"""What the counts and the durable record say of a tenant's use."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from bench.fairness.arena import Arena
from state_store.delta_log.connection import connect_redis
from state_store.quota.errors import LimitReachedError
from state_store.quota.port import QuotaKind, QuotaPort, QuotaScope
from state_store.quota.redis_quota import RedisQuota

_POLL_S = 0.05
_SETTLE_S = 5.0
_AT_ONCE = """
SELECT max(live)::int AS most FROM (
    SELECT sum(change) OVER (ORDER BY at, change) AS live FROM (
        SELECT created_at AS at, 1 AS change FROM generations WHERE tenant_id = %s
        UNION ALL SELECT finished_at, -1 FROM generations WHERE tenant_id = %s AND finished_at IS NOT NULL
    ) changes
) counts
"""


async def most_at_once(arena: Arena, tenant: str) -> int:
    """The most generations of the tenant that were live at one moment."""
    (row,) = await arena.rows(_AT_ONCE, tenant, tenant)
    return int(row["most"] or 0)


class Standings:
    """Reads the counts as the gateways do, and changes none."""

    def __init__(self, arena: Arena, quota: QuotaPort) -> None:
        self._arena = arena
        self._quota = quota

    @classmethod
    @asynccontextmanager
    async def open(cls, arena: Arena) -> "AsyncIterator[Standings]":
        redis = connect_redis(arena.stack.local.valkey.url)
        try:
            yield cls(arena, RedisQuota(redis))
        finally:
            await redis.aclose()

    async def used(self, tenant: str, kind: QuotaKind) -> int:
        """Of the tenant's limit."""
        try:
            standings = await self._quota.look(self._arena.subjects[tenant])
        except LimitReachedError as error:
            standings = list(error.standing)
        (found,) = [each for each in standings if each.kind is kind and each.scope is QuotaScope.TENANT]
        return found.limit - found.remaining

    async def until_used(self, tenant: str, kind: QuotaKind, count: int, *, within_s: float) -> None:
        """Raises TimeoutError."""
        give_up_s = time.monotonic() + within_s
        while (used := await self.used(tenant, kind)) != count:
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"{kind} of {tenant}: {used} used, not {count}")
            await asyncio.sleep(_POLL_S)

    async def settled(self, tenant: str, kind: QuotaKind, expected: int) -> int:
        """What is used once all is settled: as soon as it is as expected, else after some seconds."""
        with suppress(TimeoutError):
            await self.until_used(tenant, kind, expected, within_s=_SETTLE_S)
        return await self.used(tenant, kind)
