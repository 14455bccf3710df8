"""The admission queue in Redis or Valkey, over the scripts in lua/: one per command.

All keys of a model share a hash tag and no script crosses models; a list is one script call per model. The marker is one
key per model plus a global one: scripts check their model's; where that is absent and the global one exists, the model is
new and gets its own. What empties the server takes all of them, so everything fails until `mark_ready`. In a cluster, a
node that alone lost its keys is not noticed this way: the reaper's comparison with Postgres refills its queues.
"""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, cast
from urllib.parse import quote

from redis.asyncio import Redis

from scheduler.queue import scripts
from scheduler.queue.batches import indexes_by_model
from scheduler.queue.bounds import Load, ModelLoad, PopCount, judge_many
from scheduler.queue.codec import (
    charge_costs_of,
    pack_entry,
    pack_model,
    tenant_name,
    to_us,
    unpack_entry,
    unpack_model,
)
from scheduler.queue.errors import QueueNotReadyError, QueueUnavailableError
from scheduler.queue.port import (
    BoundCheck,
    BoundVerdict,
    EnqueueStatus,
    OutputCharge,
    Popped,
    QueueDepth,
    QueueEntry,
    SessionRoom,
)
from scheduler.queue.selection import kept_from
from scheduler.queue.settings import QueueSettings
from service_kit.ids import GenerationId, SessionId
from state_store.delta_log.connection import unavailable_as
from state_store.delta_log.lua_script import Argument, LuaScript
from state_store.model import ModelKey, PriorityClass

_GLOBAL_MARKER = "queue:marker"
_MODELS = "queue:models"
"""Every model that has a marker: what `model_keys` looks through."""
_NOT_READY = -1
_NUM_CLASSES = len(PriorityClass)


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

    async def check_many(self, checks: Sequence[BoundCheck]) -> list[BoundVerdict]:
        verdicts: dict[int, BoundVerdict] = {}
        for model_key, indexes in indexes_by_model([check.model_key for check in checks]).items():
            part = [checks[index] for index in indexes]
            judged = judge_many(part, await self._load(model_key, part), self._settings)
            verdicts.update(zip(indexes, judged, strict=True))
        return [verdicts[index] for index in range(len(checks))]

    async def enqueue_many(self, entries: Sequence[QueueEntry], *, is_rebuild: bool = False) -> list[EnqueueStatus]:
        statuses: list[EnqueueStatus] = [EnqueueStatus.ADDED] * len(entries)
        for model_key, indexes in indexes_by_model([entry.model_key for entry in entries]).items():
            part = [entries[index] for index in indexes]
            arguments = [value for entry in part for value in (entry.generation_id, pack_entry(entry))]
            if is_rebuild:
                await self._register(model_key)
            answers = await self._run(scripts.ENQUEUE, model_key, self._now(), int(is_rebuild), *arguments)
            for index, status in zip(indexes, answers, strict=True):
                statuses[index] = EnqueueStatus(status.decode())
        return statuses

    async def pop(self, model_key: ModelKey, rooms: Sequence[SessionRoom], *, max_entries: int) -> list[Popped]:
        head = scripts.pop_arguments(self._settings, rooms, max_entries=max_entries, pop_id=uuid.uuid4().hex)
        answer, sessions = await self._run(scripts.POP, model_key, self._now(), *head)
        kept = [
            (SessionId(session_id.decode()), rank)
            for session_id, rank in zip(sessions[::2], sessions[1::2], strict=True)
        ]
        popped: list[Popped] = []
        for generation_id, packed, pop_id, session_id, is_urgent in zip(*(answer[i::5] for i in range(5)), strict=True):
            pop = Popped(
                entry=unpack_entry(model_key, generation_id, packed),
                pop_id=pop_id.decode(),
                session_id=SessionId(session_id.decode()),
                is_urgent=is_urgent == 1,
            )
            popped.append(replace(pop, kept=kept_from(pop.rank, kept)))
        return popped

    async def ack_many(self, popped: Sequence[Popped]) -> None:
        await self._run_on_pops(scripts.ACK, popped)

    async def drop_many(self, popped: Sequence[Popped]) -> None:
        await self._run_on_pops(scripts.DROP, popped)

    async def return_many(self, popped: Sequence[Popped]) -> None:
        await self._run_on_pops(scripts.RETURN, popped)

    async def charge_many(self, charges: Sequence[OutputCharge]) -> None:
        for model_key, costs in charge_costs_of(charges).items():
            await self._run(scripts.CHARGE, model_key, *(value for item in costs.items() for value in item))

    async def remove_many(self, items: Sequence[tuple[ModelKey, GenerationId]]) -> None:
        for model_key, indexes in indexes_by_model([model_key for model_key, _ in items]).items():
            await self._run(scripts.REMOVE, model_key, *(items[index][1] for index in indexes))

    async def contains_many(self, items: Sequence[tuple[ModelKey, GenerationId, int]]) -> list[bool]:
        found = [False] * len(items)
        for model_key, indexes in indexes_by_model([model_key for model_key, _, _ in items]).items():
            arguments = [value for index in indexes for value in items[index][1:]]
            answers = await self._run(scripts.CONTAINS, model_key, *arguments)
            for index, answer in zip(indexes, answers, strict=True):
                found[index] = bool(answer)
        return found

    async def reap_in_flight(self, model_keys: Sequence[ModelKey]) -> int:
        return sum([int(await self._run(scripts.REAP, model_key, self._now())) for model_key in set(model_keys)])

    async def depth(self, model_key: ModelKey) -> QueueDepth:
        answer = await self._run(scripts.DEPTH, model_key, self._now())
        requests, prompt_tokens = answer[:_NUM_CLASSES], answer[_NUM_CLASSES : 2 * _NUM_CLASSES]
        delayed, in_flight, num_tenants = answer[2 * _NUM_CLASSES :]
        return QueueDepth(
            requests=(requests[0], requests[1], requests[2]),
            prompt_tokens=(prompt_tokens[0], prompt_tokens[1], prompt_tokens[2]),
            delayed=delayed,
            in_flight=in_flight,
            num_tenants=num_tenants,
        )

    async def model_keys(self) -> list[ModelKey]:
        if not await self.is_ready():
            raise _not_ready()
        with unavailable_as(QueueUnavailableError, "the queue"):
            known = [unpack_model(cast("bytes", packed)) for packed in await self._client.smembers(_MODELS)]
            return [key for key in known if await self._client.exists(f"{_tag(key)}:entries")]

    async def is_ready(self) -> bool:
        with unavailable_as(QueueUnavailableError, "the queue"):
            return bool(await self._client.exists(_GLOBAL_MARKER))

    async def mark_ready(self) -> None:
        with unavailable_as(QueueUnavailableError, "the queue"):
            await self._client.set(_GLOBAL_MARKER, "1")

    def _now(self) -> Argument:
        return "" if self._clock is None else to_us(self._clock())

    async def _load(self, model_key: ModelKey, checks: Sequence[BoundCheck]) -> ModelLoad:
        tenants = list({check.tenant_id for check in checks})
        answer = await self._run(scripts.LOAD, model_key, self._now(), *(tenant_name(tenant) for tenant in tenants))
        now_us, window, popped, popped_before, num_tenants, *loads = answer
        pairs = [Load(requests, tokens) for requests, tokens in zip(loads[::2], loads[1::2], strict=True)]
        return ModelLoad(
            now_us=now_us,
            pops=PopCount(window=window, popped=popped, popped_before=popped_before),
            num_tenants=num_tenants,
            by_rank=pairs[:_NUM_CLASSES],
            by_tenant=dict(zip(tenants, pairs[_NUM_CLASSES:], strict=True)),
        )

    async def _run_on_pops(self, script: LuaScript, popped: Sequence[Popped]) -> None:
        for model_key, indexes in indexes_by_model([pop.entry.model_key for pop in popped]).items():
            part = [popped[index] for index in indexes]
            arguments = [value for pop in part for value in (pop.entry.generation_id, pop.pop_id)]
            await self._run(script, model_key, *arguments)

    async def _run(self, script: LuaScript, model_key: ModelKey, *arguments: Argument) -> Any:
        tag = _tag(model_key)
        with unavailable_as(QueueUnavailableError, "the queue"):
            answer = await script.run(self._client, [tag], arguments)
            if answer == _NOT_READY and await self._mark_new_model(model_key):
                answer = await script.run(self._client, [tag], arguments)
        if answer == _NOT_READY:
            raise _not_ready()
        return answer

    async def _register(self, model_key: ModelKey) -> None:
        with unavailable_as(QueueUnavailableError, "the queue"):
            await self._client.sadd(_MODELS, pack_model(model_key))

    async def _mark_new_model(self, model_key: ModelKey) -> bool:
        """Gives the model its marker if the queue as a whole is ready. Asked again after the write: the server may have
        been emptied in between, and then a marker of ours would hide it."""
        if not await self._client.exists(_GLOBAL_MARKER):
            return False
        marker = f"{_tag(model_key)}:marker"
        await self._register(model_key)
        await self._client.set(marker, "1")
        if await self._client.exists(_GLOBAL_MARKER):
            return True
        await self._client.delete(marker)
        return False


def _tag(model_key: ModelKey) -> str:
    return f"{{q:{quote(model_key.revision, safe='')}:{quote(model_key.precision, safe='')}}}"


def _not_ready() -> QueueNotReadyError:
    return QueueNotReadyError("the queue was emptied and is not rebuilt yet")
