"""The delta log in Redis or Valkey: writer and reader over the scripts in lua/.

Only open, append, seal and attach decide about a log; watch and unwatch touch leases alone, the others only read. All keys
of a generation share the hash tag of its shard, no script crosses shards, and a list is one script call per shard (and
per `max_items_per_call` items).
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zlib import crc32

from redis.asyncio import Redis

from service_kit.delta import Cursor
from service_kit.ids import GatewayId, GenerationId
from state_store.delta_log.codec import pack_chain, pack_delta, pack_end, unpack_chain, unpack_delta, unpack_end
from state_store.delta_log.connection import unavailable_as
from state_store.delta_log.lua_script import Argument, LuaScript
from state_store.delta_log.port import (
    AppendItem,
    AppendResult,
    AppendStatus,
    LogView,
    OpenItem,
    OpenResult,
    Push,
    SealItem,
)
from state_store.delta_log.redis_feed import RedisFeed
from state_store.delta_log.settings import LogSettings
from state_store.errors import LogUnavailableError

_LUA = Path(__file__).parent / "lua"


def _script(name: str) -> LuaScript:
    return LuaScript(_LUA / "prelude.lua", _LUA / f"{name}.lua")


_OPEN, _APPEND, _SEAL, _ATTACH = (_script(name) for name in ("open", "append", "seal", "attach"))
_READ, _WATCH, _UNWATCH, _LAST_WATCHED = (_script(name) for name in ("read", "watch", "unwatch", "last_watched"))
_KEPT_SINCE, _DROP = _script("kept_since"), _script("drop")

_ID_LENGTH = 36
_DELTAS, _WATCHERS = ":deltas", ":watchers"
_Item = tuple[GenerationId, tuple[Argument, ...]]


class RedisDeltaLog:
    """`DeltaLogWriter` and `DeltaLogReader`. `num_shards` must be the same in every process that shares the log.

    Time is the server's; a `clock` replaces it in tests. The caller owns `client` and closes it.
    """

    def __init__(
        self,
        client: Redis,
        *,
        num_shards: int = 1,
        settings: LogSettings | None = None,
        feed: RedisFeed | None = None,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        if num_shards < 1:
            raise ValueError("num_shards: must be at least 1")
        self._client = client
        self._num_shards = num_shards
        self._settings = settings or LogSettings()
        self._feed = feed or RedisFeed(client)
        self._clock = clock

    async def open_many(self, items: Sequence[OpenItem]) -> list[OpenResult]:
        calls: list[_Item] = [
            (item.generation_id, (item.attempt, item.base.sequence_number, pack_chain(item.base.chain)))
            for item in items
        ]
        replies = await self._run_named(_OPEN, calls, self._now(), _ms(self._settings.live_retention))
        return [_open_result(reply) for reply in replies]

    async def append_many(self, items: Sequence[AppendItem]) -> list[AppendResult]:
        replies = await self._run_named(
            _APPEND, [_append_call(item) for item in items], self._now(), _ms(self._settings.live_retention)
        )
        return [
            AppendResult(status=AppendStatus(status.decode()), end=_cursor(last, chain))
            for status, last, chain in replies
        ]

    async def seal_many(self, items: Sequence[SealItem]) -> list[LogView]:
        calls: list[_Item] = [
            (item.generation_id, (item.attempt, b"" if item.terminal is None else pack_end(item.terminal)))
            for item in items
        ]
        replies = await self._run_named(_SEAL, calls, self._now(), _ms(self._settings.terminal_retention))
        return [_view(item.generation_id, reply) for item, reply in zip(items, replies, strict=True)]

    async def drop_many(self, generation_ids: Sequence[GenerationId]) -> None:
        await self._run(_DROP, [(generation_id, ()) for generation_id in generation_ids])

    async def unsealed_page(self, place: int, *, limit: int) -> tuple[list[GenerationId], int]:
        with unavailable_as(LogUnavailableError, "the delta log"):
            # Each `?` is one character of an id, and what follows names another key of the same generation.
            place, keys = await self._client.scan(place, match=f"log:{{s*}}:{'?' * _ID_LENGTH}*", count=limit)
            logs = list(dict.fromkeys(_text(key).removesuffix(_WATCHERS) for key in keys))
            logs = [log for log in logs if not log.endswith(_DELTAS)]
            async with self._client.pipeline(transaction=False) as pipeline:
                for log in logs:
                    pipeline.hexists(log, "terminal")
                is_sealed = await pipeline.execute()
        named = [GenerationId(log[-_ID_LENGTH:]) for log in logs]
        return [each for each, is_over in zip(named, is_sealed, strict=True) if not is_over], int(place)

    async def read_many(self, items: Sequence[tuple[GenerationId, int]]) -> list[LogView]:
        replies = await self._run(_READ, [(generation_id, (after,)) for generation_id, after in items])
        return [_view(generation_id, reply) for (generation_id, _), reply in zip(items, replies, strict=True)]

    async def last_watched_many(self, generation_ids: Sequence[GenerationId]) -> list[datetime | None]:
        replies = await self._run(_LAST_WATCHED, [(each, ()) for each in generation_ids], self._now())
        return [None if at_ms < 0 else datetime.fromtimestamp(at_ms / 1000, UTC) for at_ms in replies]

    async def kept_since(self) -> datetime:
        with unavailable_as(LogUnavailableError, "the delta log"):
            replies = [
                await _KEPT_SINCE.run(self._client, [f"log:{{s{shard}}}:kept_since"], [self._now()])
                for shard in range(self._num_shards)
            ]
        return datetime.fromtimestamp(max(replies) / 1000, UTC)

    async def attach_many(self, gateway_id: GatewayId, items: Sequence[tuple[GenerationId, int]]) -> list[LogView]:
        calls: list[_Item] = [(generation_id, (after,)) for generation_id, after in items]
        replies = await self._run(_ATTACH, calls, self._now(), gateway_id, *self._watch_times())
        return [_view(generation_id, reply) for (generation_id, _), reply in zip(items, replies, strict=True)]

    async def watch_many(self, gateway_id: GatewayId, generation_ids: Sequence[GenerationId]) -> None:
        calls: list[_Item] = [(each, ()) for each in generation_ids]
        await self._run(_WATCH, calls, self._now(), gateway_id, *self._watch_times())

    async def unwatch_many(self, gateway_id: GatewayId, generation_ids: Sequence[GenerationId]) -> None:
        await self._run(_UNWATCH, [(each, ()) for each in generation_ids], self._now(), gateway_id)

    def subscribe(self, gateway_id: GatewayId) -> AsyncIterator[Sequence[Push] | None]:
        return self._feed.follow(gateway_id)

    def _now(self) -> Argument:
        return "" if self._clock is None else int(self._clock().timestamp() * 1000)

    def _watch_times(self) -> tuple[int, int, int]:
        settings = self._settings
        return _ms(settings.watch_lease), _ms(settings.watch_retention), _ms(settings.live_retention)

    async def _run_named(self, script: LuaScript, items: Sequence[_Item], *head: Argument) -> list[Any]:
        """As `_run`, for scripts that push and so want each item's id among its arguments."""
        return await self._run(script, [(each, (each, *arguments)) for each, arguments in items], *head)

    async def _run(self, script: LuaScript, items: Sequence[_Item], *head: Argument) -> list[Any]:
        """One reply per item, in order. Items of one generation keep their order: they share a shard."""
        indexes_by_shard: defaultdict[int, list[int]] = defaultdict(list)
        for index, (generation_id, _) in enumerate(items):
            indexes_by_shard[crc32(generation_id.encode()) % self._num_shards].append(index)
        replies: list[Any] = [None] * len(items)
        with unavailable_as(LogUnavailableError, "the delta log"):
            outcomes = await asyncio.gather(
                *(
                    self._run_shard(script, shard, [(index, items[index]) for index in indexes], head, replies)
                    for shard, indexes in indexes_by_shard.items()
                ),
                return_exceptions=True,
            )
            for outcome in outcomes:
                if outcome is not None:
                    raise outcome
        return replies

    async def _run_shard(
        self,
        script: LuaScript,
        shard: int,
        items: Sequence[tuple[int, _Item]],
        head: Sequence[Argument],
        replies: list[Any],
    ) -> None:
        size = self._settings.max_items_per_call
        for start in range(0, len(items), size):
            part = items[start : start + size]
            keys = [key for _, (generation_id, _) in part for key in _keys(shard, generation_id)]
            arguments = [*head, *(argument for _, (_, arguments) in part for argument in arguments)]
            answer = await script.run(self._client, keys, arguments)
            for (index, _), reply in zip(part, answer, strict=True):
                replies[index] = reply


def _keys(shard: int, generation_id: GenerationId) -> tuple[str, str, str]:
    prefix = f"log:{{s{shard}}}:{generation_id}"
    return prefix, prefix + _DELTAS, prefix + _WATCHERS


def _ms(duration: timedelta) -> int:
    return int(duration.total_seconds() * 1000)


def _append_call(item: AppendItem) -> _Item:
    delta = item.delta
    chains = pack_chain(delta.prev_chain), pack_chain(delta.chain)
    return item.generation_id, (item.attempt, delta.first, delta.last, *chains, pack_delta(delta))


def _cursor(sequence_number: int, chain: bytes) -> Cursor:
    return Cursor(sequence_number=sequence_number, chain=unpack_chain(chain))


def _open_result(reply: list[Any]) -> OpenResult:
    is_opened, attempt, base, base_chain, last, last_chain, deltas = reply
    return OpenResult(
        is_opened=bool(is_opened),
        attempt=attempt,
        base=_cursor(base, base_chain),
        end=_cursor(last, last_chain),
        deltas=tuple(unpack_delta(delta) for delta in deltas),
    )


def _view(generation_id: GenerationId, reply: list[Any]) -> LogView:
    if not reply[0]:
        return LogView(generation_id=generation_id, is_present=False)
    _, attempt, is_open, base, base_chain, last, last_chain, terminal, deltas = reply
    return LogView(
        generation_id=generation_id,
        is_present=True,
        attempt=attempt,
        is_open=bool(is_open),
        base=_cursor(base, base_chain),
        end=_cursor(last, last_chain),
        deltas=tuple(unpack_delta(delta) for delta in deltas),
        terminal=unpack_end(terminal) if terminal else None,
    )


def _text(key: bytes | str) -> str:
    return key.decode() if isinstance(key, bytes) else key
