"""Quotas in Redis or Valkey, over the scripts in lua/: one per command.

All keys of a tenant share the hash tag of its shard and no script crosses shards. The keys of a subject (a tenant or an API
key) are named inside the scripts, by ids that reservations hold; they carry the tag of the script's own keys.
"""

import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from zlib import crc32

from redis.asyncio import Redis

from service_kit.ids import GenerationId, TenantId, minted_at
from state_store.delta_log.connection import unavailable_as
from state_store.delta_log.lua_script import Argument, LuaScript
from state_store.quota.errors import QuotaNotReadyError, QuotaUnavailableError
from state_store.quota.measure import Measure, is_limited, limits_of, refusal_of, standing_of
from state_store.quota.port import PastUse, QuotaCharge, QuotaSettlement, QuotaStanding, QuotaSubject
from state_store.quota.settings import QuotaSettings

_LUA = Path(__file__).parent / "lua"
_KEYS = ("marker", "reservations", "checks", "settled", "concurrent", "reserved", "rebuild", "touched")
_NOT_READY = -1
DEFAULT_NUM_SHARDS = 4


def _script(*names: str) -> LuaScript:
    return LuaScript(*(_LUA / f"{name}.lua" for name in ("prelude", *names)))


_LOOK, _RESERVE = _script("measure", "look"), _script("measure", "reserve")
_BIND, _RELEASE, _SETTLE, _DUE, _DROP = (_script(name) for name in ("bind", "release", "settle", "due", "drop"))
_BEGIN, _REBUILD, _READY = (_script(name) for name in ("begin", "rebuild", "ready"))

_Item = tuple[Argument, ...]


class RedisQuota:
    """`QuotaPort` and `QuotaUpkeep`. `num_shards` must be the same in every process that shares the counts.

    Time is the server's; a `clock` replaces it in tests. Mutable state: the shards that this adapter is rebuilding, under a
    token of its own. The caller owns `client` and closes it.
    """

    def __init__(
        self,
        client: Redis,
        *,
        num_shards: int = DEFAULT_NUM_SHARDS,
        settings: QuotaSettings | None = None,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        if num_shards < 1:
            raise ValueError("num_shards: must be at least 1")
        self._client = client
        self._num_shards = num_shards
        self._settings = settings or QuotaSettings()
        self._clock = clock
        self._token = uuid.uuid4().hex
        self._rebuilding: frozenset[int] = frozenset()

    async def look(self, subject: QuotaSubject) -> list[QuotaStanding]:
        if not is_limited(subject):
            return []
        return await self._measured(_LOOK, subject)

    async def reserve(self, charge: QuotaCharge, subject: QuotaSubject) -> list[QuotaStanding]:
        lease_ms = _ms(self._settings.lease)
        return await self._measured(_RESERVE, subject, charge.generation_id, charge.tokens, lease_ms)

    async def _measured(self, script: LuaScript, subject: QuotaSubject, *more: Argument) -> list[QuotaStanding]:
        limits = list(limits_of(subject))
        head = [self._now(), subject.tenant_id, subject.key_id]
        arguments = [*head, *("" if limit is None else limit for _, _, limit in limits), *more]
        must_wait, *numbers = await self._run(script, self._shard(subject.tenant_id), *arguments)
        measures = [
            Measure(
                scope=scope,
                kind=kind,
                limit=limit,
                used=used,
                reset=timedelta(milliseconds=reset),
                wait=timedelta(milliseconds=wait) if wait >= 0 else None,
            )
            for (scope, kind, limit), used, reset, wait in zip(
                limits, numbers[::3], numbers[1::3], numbers[2::3], strict=True
            )
            if limit is not None
        ]
        if must_wait:
            raise refusal_of(subject, measures)
        return standing_of(measures)

    async def bind_many(self, charges: Sequence[QuotaCharge]) -> None:
        recheck_ms = _ms(self._settings.recheck)
        await self._run_each(_BIND, [(each.tenant_id, _charge(each)) for each in charges], self._now(), recheck_ms)

    async def release_many(self, charges: Sequence[QuotaCharge]) -> None:
        items: list[tuple[TenantId, _Item]] = [(charge.tenant_id, (charge.generation_id,)) for charge in charges]
        await self._run_each(_RELEASE, items, self._now())

    async def settle_many(self, items: Sequence[QuotaSettlement]) -> None:
        kept_ms = _ms(self._settings.settled_kept)
        calls: list[tuple[TenantId, _Item]] = [
            (item.tenant_id, (item.generation_id, item.used_tokens)) for item in items
        ]
        await self._run_each(_SETTLE, calls, self._now(), kept_ms)

    async def is_ready(self) -> bool:
        with unavailable_as(QuotaUnavailableError, "the quotas' server"):
            for shard in range(self._num_shards):
                if not await self._client.exists(_key(shard, "marker")):
                    return False
        return True

    async def due_many(self, *, limit: int) -> list[GenerationId]:
        due: list[GenerationId] = []
        for shard in range(self._num_shards):
            found = await self._run(_DUE, shard, self._now(), limit - len(due))
            due += [GenerationId(each.decode()) for each in found]
            if len(due) >= limit:
                break
        return due

    async def drop_many(self, generation_ids: Sequence[GenerationId]) -> None:
        """A generation that does not exist names no tenant: every shard is asked."""
        for part in self._parts(generation_ids):
            for shard in range(self._num_shards):
                await self._run(_DROP, shard, self._now(), *part)

    async def begin_rebuild(self) -> bool:
        """Shard by shard in order: of several adapters that begin at once, one gets all that is to be rebuilt."""
        self._rebuilding = frozenset()
        begun: set[int] = set()
        for shard in range(self._num_shards):
            answer = await self._run(_BEGIN, shard, self._token, _ms(self._settings.rebuild_hold))
            if answer == b"BUSY":
                return False
            if answer == b"BEGUN":
                begun.add(shard)
        self._rebuilding = frozenset(begun)
        return bool(begun)

    async def rebuild(self, live: Sequence[QuotaCharge], past: Sequence[PastUse]) -> None:
        if not self._rebuilding:
            raise _lost_rebuild()
        settings = self._settings
        head = (self._now(), self._token, _ms(settings.rebuild_hold), _ms(settings.lease))
        for shard, charges in self._by_shard([(each.tenant_id, each) for each in live]).items():
            for part in self._parts(charges):
                arguments = [argument for charge in part for argument in _charge(charge)]
                await self._add(shard, *head, len(part), *arguments)
        for shard, uses in self._by_shard([(each.tenant_id, each) for each in past]).items():
            for use_part in self._parts(uses):
                arguments = [argument for use in use_part for argument in _past(use)]
                await self._add(shard, *head, 0, *arguments)

    async def _add(self, shard: int, *arguments: Argument) -> None:
        """Shards that have kept their counts are left as they are."""
        if shard in self._rebuilding and not await self._run(_REBUILD, shard, *arguments):
            raise _lost_rebuild()

    async def mark_ready(self) -> None:
        if not self._rebuilding:
            raise _lost_rebuild()
        for shard in sorted(self._rebuilding):
            if not await self._run(_READY, shard, self._token):
                raise _lost_rebuild()
        self._rebuilding = frozenset()

    def _now(self) -> Argument:
        return "" if self._clock is None else int(self._clock().timestamp() * 1000)

    def _shard(self, tenant_id: TenantId) -> int:
        return crc32(tenant_id.encode()) % self._num_shards

    def _by_shard(self, items: Iterable[tuple[TenantId, Any]]) -> dict[int, list[Any]]:
        by_shard: defaultdict[int, list[Any]] = defaultdict(list)
        for tenant_id, item in items:
            by_shard[self._shard(tenant_id)].append(item)
        return by_shard

    def _parts(self, items: Sequence[Any]) -> list[Sequence[Any]]:
        size = self._settings.max_items_per_call
        return [items[start : start + size] for start in range(0, len(items), size)]

    async def _run_each(self, script: LuaScript, items: Sequence[tuple[TenantId, _Item]], *head: Argument) -> None:
        for shard, calls in self._by_shard(items).items():
            for part in self._parts(calls):
                await self._run(script, shard, *head, *(argument for call in part for argument in call))

    async def _run(self, script: LuaScript, shard: int, *arguments: Argument) -> Any:
        with unavailable_as(QuotaUnavailableError, "the quotas' server"):
            answer = await script.run(self._client, [_key(shard, name) for name in _KEYS], arguments)
        if answer == _NOT_READY:
            raise QuotaNotReadyError("the quotas were emptied and are not rebuilt yet")
        return answer


def _key(shard: int, name: str) -> str:
    return f"{{quota:{shard}}}:{name}"


def _ms(duration: timedelta) -> int:
    return duration // timedelta(milliseconds=1)


def _charge(charge: QuotaCharge) -> _Item:
    second = int(minted_at(charge.generation_id).timestamp())
    return charge.generation_id, charge.tenant_id, charge.key_id, charge.tokens, second


def _past(use: PastUse) -> _Item:
    seconds = [number for second, *counts in use.by_second for number in (int(second.timestamp()), *counts)]
    return use.tenant_id, use.key_id, use.day_tokens, use.month_tokens, len(use.by_second), *seconds


def _lost_rebuild() -> QuotaNotReadyError:
    return QuotaNotReadyError("the rebuild of the quotas is not this process's any more")
