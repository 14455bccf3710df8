"""An admission queue that is two: whatever is done to the one on the server is done to its memory twin."""

from collections.abc import Sequence
from dataclasses import replace

from scheduler.queue.memory import MemoryAdmissionQueue
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
from scheduler.queue.redis_queue import RedisAdmissionQueue
from service_kit.ids import GenerationId
from state_store.model import ModelKey


class TwinnedQueue:
    """`AdmissionQueue`. Both must go by one clock that stands still during a call; every answer is compared."""

    def __init__(self, queue: RedisAdmissionQueue, twin: MemoryAdmissionQueue) -> None:
        self.queue = queue
        self.twin = twin
        self._twin_pops: dict[str, Popped] = {}

    async def check_many(self, checks: Sequence[BoundCheck]) -> list[BoundVerdict]:
        verdicts = await self.queue.check_many(checks)
        assert verdicts == await self.twin.check_many(checks)
        return verdicts

    async def enqueue_many(self, entries: Sequence[QueueEntry], *, is_rebuild: bool = False) -> list[EnqueueStatus]:
        statuses = await self.queue.enqueue_many(entries, is_rebuild=is_rebuild)
        assert statuses == await self.twin.enqueue_many(entries, is_rebuild=is_rebuild)
        return statuses

    async def pop(self, model_key: ModelKey, rooms: Sequence[SessionRoom], *, max_entries: int) -> list[Popped]:
        popped = await self.queue.pop(model_key, rooms, max_entries=max_entries)
        twins = await self.twin.pop(model_key, rooms, max_entries=max_entries)
        assert [replace(pop, pop_id="") for pop in popped] == [replace(pop, pop_id="") for pop in twins]
        self._twin_pops |= {pop.pop_id + pop.entry.generation_id: twin for pop, twin in zip(popped, twins, strict=True)}
        return popped

    async def ack_many(self, popped: Sequence[Popped]) -> None:
        await self.queue.ack_many(popped)
        await self.twin.ack_many(self._twins_of(popped))

    async def drop_many(self, popped: Sequence[Popped]) -> None:
        await self.queue.drop_many(popped)
        await self.twin.drop_many(self._twins_of(popped))

    async def return_many(self, popped: Sequence[Popped]) -> None:
        await self.queue.return_many(popped)
        await self.twin.return_many(self._twins_of(popped))

    async def charge_many(self, charges: Sequence[OutputCharge]) -> None:
        await self.queue.charge_many(charges)
        await self.twin.charge_many(charges)

    async def remove_many(self, items: Sequence[tuple[ModelKey, GenerationId]]) -> None:
        await self.queue.remove_many(items)
        await self.twin.remove_many(items)

    async def contains_many(self, items: Sequence[tuple[ModelKey, GenerationId, int]]) -> list[bool]:
        found = await self.queue.contains_many(items)
        assert found == await self.twin.contains_many(items)
        return found

    async def reap_in_flight(self, model_keys: Sequence[ModelKey]) -> int:
        count = await self.queue.reap_in_flight(model_keys)
        assert count == await self.twin.reap_in_flight(model_keys)
        return count

    async def depth(self, model_key: ModelKey) -> QueueDepth:
        depth = await self.queue.depth(model_key)
        assert depth == await self.twin.depth(model_key)
        return depth

    async def model_keys(self) -> list[ModelKey]:
        model_keys = await self.queue.model_keys()
        assert set(model_keys) == set(await self.twin.model_keys())
        return model_keys

    async def is_ready(self) -> bool:
        return await self.queue.is_ready()

    async def mark_ready(self) -> None:
        await self.queue.mark_ready()
        await self.twin.mark_ready()

    def _twins_of(self, popped: Sequence[Popped]) -> list[Popped]:
        return [self._twin_pops[pop.pop_id + pop.entry.generation_id] for pop in popped]
