"""Memory twin of the admission queue: the same rules as the scripts in lua/, for tests and simulations in one process."""

import uuid
from collections.abc import Callable, Sequence
from datetime import datetime

from scheduler.queue.batches import indexes_by_model
from scheduler.queue.bounds import Load, ModelLoad, judge_many
from scheduler.queue.codec import charge_costs_of, tenant_name, to_us
from scheduler.queue.errors import QueueNotReadyError, QueueUnavailableError
from scheduler.queue.model_queue import ModelQueue, Slot
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
from scheduler.queue.selection import Selection
from scheduler.queue.settings import QueueSettings
from service_kit.ids import GenerationId
from state_store.model import ModelKey


class MemoryAdmissionQueue:
    """The queue in one process's memory; it starts without its marker. `clock` gives the aware time.

    Faults for tests: `is_reachable = False` makes every call raise, `lose_all()` empties it, marker included.
    """

    def __init__(self, clock: Callable[[], datetime], settings: QueueSettings | None = None) -> None:
        self._clock = clock
        self._settings = settings or QueueSettings()
        self._queues: dict[ModelKey, ModelQueue] = {}
        self._has_marker = False
        self.is_reachable = True

    def lose_all(self) -> None:
        self._queues.clear()
        self._has_marker = False

    def state_of(self, model_key: ModelKey) -> ModelQueue:
        """The model's structures, for tests that look inside."""
        return self._queues.setdefault(model_key, ModelQueue())

    async def check_many(self, checks: Sequence[BoundCheck]) -> list[BoundVerdict]:
        self._check_ready()
        verdicts: dict[int, BoundVerdict] = {}
        for model_key, indexes in indexes_by_model([check.model_key for check in checks]).items():
            part = [checks[index] for index in indexes]
            judged = judge_many(part, self._load(model_key, part), self._settings)
            verdicts.update(zip(indexes, judged, strict=True))
        return [verdicts[index] for index in range(len(checks))]

    async def enqueue_many(self, entries: Sequence[QueueEntry], *, is_rebuild: bool = False) -> list[EnqueueStatus]:
        if is_rebuild:
            self._check_reachable()
        else:
            self._check_ready()
        return [self._enqueue(entry) for entry in entries]

    async def pop(self, model_key: ModelKey, rooms: Sequence[SessionRoom], *, max_entries: int) -> list[Popped]:
        self._check_ready()
        selection = Selection(
            self.state_of(model_key), self._settings, now_us=to_us(self._clock()), pop_id=uuid.uuid4().hex
        )
        return selection.run(rooms, max_entries)

    async def ack_many(self, popped: Sequence[Popped]) -> None:
        self._check_ready()
        for queue, slot in self._in_flight(popped):
            queue.discard(slot.entry.generation_id, is_refunded=False)

    async def drop_many(self, popped: Sequence[Popped]) -> None:
        self._check_ready()
        for queue, slot in self._in_flight(popped):
            queue.discard(slot.entry.generation_id, is_refunded=True)

    async def return_many(self, popped: Sequence[Popped]) -> None:
        self._check_ready()
        for queue, slot in self._in_flight(popped):
            queue.put_back(slot)

    async def charge_many(self, charges: Sequence[OutputCharge]) -> None:
        self._check_ready()
        for model_key, costs in charge_costs_of(charges).items():
            counters = self.state_of(model_key).counters
            for tenant, cost in costs.items():
                counters.charge(tenant, cost)

    async def remove_many(self, items: Sequence[tuple[ModelKey, GenerationId]]) -> None:
        self._check_ready()
        for model_key, generation_id in items:
            queue = self.state_of(model_key)
            if generation_id in queue.slots:
                queue.discard(generation_id, is_refunded=True)

    async def contains_many(self, items: Sequence[tuple[ModelKey, GenerationId, int]]) -> list[bool]:
        self._check_ready()
        found = [(self.state_of(model_key).slots.get(generation), attempt) for model_key, generation, attempt in items]
        return [slot is not None and slot.entry.attempt == attempt for slot, attempt in found]

    async def reap_in_flight(self, model_keys: Sequence[ModelKey]) -> int:
        self._check_ready()
        now_us = to_us(self._clock())
        count = 0
        for queue in [self.state_of(model_key) for model_key in set(model_keys)]:
            in_flight = [slot for slot in queue.slots.values() if slot.pop_id is not None]
            for slot in sorted(in_flight, key=lambda slot: (slot.held_until_us, slot.entry.generation_id)):
                if slot.held_until_us <= now_us:
                    queue.put_back(slot)
                    count += 1
        return count

    async def depth(self, model_key: ModelKey) -> QueueDepth:
        self._check_ready()
        queue = self.state_of(model_key)
        queue.expire(to_us(self._clock()))
        interactive, standard, batch = queue.by_rank
        return QueueDepth(
            requests=(interactive.requests, standard.requests, batch.requests),
            prompt_tokens=(interactive.prompt_tokens, standard.prompt_tokens, batch.prompt_tokens),
            delayed=sum(slot.is_delayed for slot in queue.slots.values()),
            in_flight=sum(queue.in_flight_by_tenant.values()),
            num_tenants=len(queue.counters.active),
        )

    async def model_keys(self) -> list[ModelKey]:
        self._check_ready()
        return [model_key for model_key, queue in self._queues.items() if queue.slots]

    async def is_ready(self) -> bool:
        self._check_reachable()
        return self._has_marker

    async def mark_ready(self) -> None:
        self._check_reachable()
        self._has_marker = True

    def _enqueue(self, entry: QueueEntry) -> EnqueueStatus:
        queue = self.state_of(entry.model_key)
        known = queue.slots.get(entry.generation_id)
        if known is not None:
            if known.entry.attempt >= entry.attempt:
                return EnqueueStatus.PRESENT
            # Only a grant makes a newer attempt: the charge of what is in flight stands.
            queue.discard(entry.generation_id, is_refunded=False)
        queue.add(entry, to_us(self._clock()))
        return EnqueueStatus.ADDED

    def _in_flight(self, popped: Sequence[Popped]) -> list[tuple[ModelQueue, Slot]]:
        """Those of the pops that still hold their entry."""
        found: list[tuple[ModelQueue, Slot]] = []
        seen: set[str] = set()
        for pop in popped:
            queue = self.state_of(pop.entry.model_key)
            slot = queue.slots.get(pop.entry.generation_id)
            if slot is not None and slot.pop_id == pop.pop_id and pop.pop_id not in seen:
                seen.add(pop.pop_id)
                found.append((queue, slot))
        return found

    def _load(self, model_key: ModelKey, checks: Sequence[BoundCheck]) -> ModelLoad:
        queue, now_us = self.state_of(model_key), to_us(self._clock())
        queue.expire(now_us)
        tenants = {check.tenant_id: queue.by_tenant.get(tenant_name(check.tenant_id), Load()) for check in checks}
        return ModelLoad(
            now_us=now_us,
            pops=queue.pops,
            num_tenants=len(queue.counters.active),
            by_rank=[Load(load.requests, load.prompt_tokens) for load in queue.by_rank],
            by_tenant={tenant: Load(load.requests, load.prompt_tokens) for tenant, load in tenants.items()},
        )

    def _check_ready(self) -> None:
        self._check_reachable()
        if not self._has_marker:
            raise QueueNotReadyError("the queue was emptied and is not rebuilt yet")

    def _check_reachable(self) -> None:
        if not self.is_reachable:
            raise QueueUnavailableError("the queue cannot be reached")
