"""The admission queue in Redis or Valkey, over the scripts in lua/: one per command.

All keys of a model share a hash tag and no script crosses models; a list is one script call per model. The marker is one
key per model plus a global one: scripts check their model's; where that is absent and the global one exists, the model is
new and gets its own. What empties the server takes all of them, so everything fails until `mark_ready`. In a cluster, a
node that alone lost its keys is not noticed this way: the reaper's comparison with Postgres refills its queues.
"""

import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

from redis.asyncio import Redis

from scheduler.queue.codec import pack_entry, to_ms, unpack_entry
from scheduler.queue.errors import QueueNotReadyError, QueueUnavailableError
from scheduler.queue.port import EnqueueStatus, Popped, QueueEntry, Room
from scheduler.queue.settings import QueueSettings
from service_kit.ids import GenerationId
from state_store.delta_log.connection import unavailable_as
from state_store.delta_log.lua_script import Argument, LuaScript
from state_store.model import ModelKey, PriorityClass

_LUA = Path(__file__).parent / "lua"
_GLOBAL_MARKER = "queue:marker"
_NOT_READY = -1


def _script(name: str) -> LuaScript:
    return LuaScript(_LUA / "prelude.lua", _LUA / f"{name}.lua")


_ENQUEUE, _POP, _ACK, _RETURN, _REMOVE = (_script(name) for name in ("enqueue", "pop", "ack", "return", "remove"))
_CONTAINS, _REAP, _DEPTH = (_script(name) for name in ("contains", "reap", "depth"))


class RedisAdmissionQueue:
    """`AdmissionQueue`. Time is the server's; a `clock` replaces it in tests. The caller owns `client` and closes it."""

    def __init__(
        self,
        client: Redis,
        settings: QueueSettings | None = None,
        *,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        self._client = client
        self._settings = settings or QueueSettings()
        self._clock = clock

    async def enqueue_many(self, entries: Sequence[QueueEntry], *, is_bounded: bool) -> list[EnqueueStatus]:
        bound: Argument = self._settings.max_entries if is_bounded else ""
        statuses: list[EnqueueStatus] = [EnqueueStatus.ADDED] * len(entries)
        for model_key, indexes in _by_model([entry.model_key for entry in entries]).items():
            part = [entries[index] for index in indexes]
            arguments = [value for entry in part for value in (entry.generation_id, pack_entry(entry))]
            answers = await self._run(_ENQUEUE, model_key, bound, *arguments)
            for index, status in zip(indexes, answers, strict=True):
                statuses[index] = EnqueueStatus(status.decode())
        return statuses

    async def pop(self, model_key: ModelKey, room: Room) -> list[Popped]:
        hold_ms = self._settings.pop_hold // timedelta(milliseconds=1)
        head = (self._now(), hold_ms, room.max_entries, uuid.uuid4().hex, *room.max_tokens, room.max_charged)
        answer = await self._run(_POP, model_key, *head)
        return [
            Popped(entry=unpack_entry(model_key, generation_id, packed), pop_id=pop_id.decode())
            for generation_id, packed, pop_id in zip(answer[::3], answer[1::3], answer[2::3], strict=True)
        ]

    async def ack_many(self, popped: Sequence[Popped]) -> None:
        await self._run_on_pops(_ACK, popped)

    async def return_many(self, popped: Sequence[Popped]) -> None:
        await self._run_on_pops(_RETURN, popped)

    async def remove_many(self, items: Sequence[tuple[ModelKey, GenerationId]]) -> None:
        for model_key, indexes in _by_model([model_key for model_key, _ in items]).items():
            await self._run(_REMOVE, model_key, *(items[index][1] for index in indexes))

    async def contains_many(self, items: Sequence[tuple[ModelKey, GenerationId, int]]) -> list[bool]:
        found = [False] * len(items)
        for model_key, indexes in _by_model([model_key for model_key, _, _ in items]).items():
            arguments = [value for index in indexes for value in items[index][1:]]
            answers = await self._run(_CONTAINS, model_key, *arguments)
            for index, answer in zip(indexes, answers, strict=True):
                found[index] = bool(answer)
        return found

    async def reap_in_flight(self, model_keys: Sequence[ModelKey]) -> int:
        return sum([int(await self._run(_REAP, model_key, self._now())) for model_key in set(model_keys)])

    async def depth(self, model_key: ModelKey) -> dict[PriorityClass, int]:
        counts = await self._run(_DEPTH, model_key)
        return {PriorityClass.from_rank(rank): count for rank, count in enumerate(counts)}

    async def is_ready(self) -> bool:
        with unavailable_as(QueueUnavailableError, "the queue"):
            return bool(await self._client.exists(_GLOBAL_MARKER))

    async def mark_ready(self) -> None:
        with unavailable_as(QueueUnavailableError, "the queue"):
            await self._client.set(_GLOBAL_MARKER, "1")

    def _now(self) -> Argument:
        return "" if self._clock is None else to_ms(self._clock())

    async def _run_on_pops(self, script: LuaScript, popped: Sequence[Popped]) -> None:
        for model_key, indexes in _by_model([pop.entry.model_key for pop in popped]).items():
            part = [popped[index] for index in indexes]
            await self._run(script, model_key, *(value for pop in part for value in (_id(pop), pop.pop_id)))

    async def _run(self, script: LuaScript, model_key: ModelKey, *arguments: Argument) -> Any:
        keys = _keys(model_key)
        with unavailable_as(QueueUnavailableError, "the queue"):
            answer = await script.run(self._client, keys, arguments)
            if answer == _NOT_READY and await self._mark_new_model(keys[0]):
                answer = await script.run(self._client, keys, arguments)
        if answer == _NOT_READY:
            raise QueueNotReadyError("the queue was emptied and is not rebuilt yet")
        return answer

    async def _mark_new_model(self, marker: str) -> bool:
        """Gives the model its marker if the queue as a whole is ready. Asked again after the write: the server may have
        been emptied in between, and then a marker of ours would hide it."""
        if not await self._client.exists(_GLOBAL_MARKER):
            return False
        await self._client.set(marker, "1")
        if await self._client.exists(_GLOBAL_MARKER):
            return True
        await self._client.delete(marker)
        return False


def _keys(model_key: ModelKey) -> list[str]:
    tag = f"{{q:{quote(model_key.revision, safe='')}:{quote(model_key.precision, safe='')}}}"
    classes = [f"{tag}:class:{priority_class.rank}" for priority_class in PriorityClass]
    return [f"{tag}:marker", *classes, f"{tag}:entries", f"{tag}:in_flight", f"{tag}:pops"]


def _id(pop: Popped) -> GenerationId:
    return pop.entry.generation_id


def _by_model(model_keys: Sequence[ModelKey]) -> dict[ModelKey, list[int]]:
    """Indexes of the items of each model."""
    indexes: defaultdict[ModelKey, list[int]] = defaultdict(list)
    for index, model_key in enumerate(model_keys):
        indexes[model_key].append(index)
    return indexes
