"""Memory twin of the admission queue: the same rules as the scripts in lua/, for tests and simulations in one process."""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from scheduler.queue.codec import to_ms
from scheduler.queue.errors import QueueNotReadyError, QueueUnavailableError
from scheduler.queue.port import EnqueueStatus, Popped, QueueEntry, Room
from scheduler.queue.settings import QueueSettings
from service_kit.ids import GenerationId
from state_store.model import ModelKey, PriorityClass


@dataclass(slots=True)
class _Slot:
    """An entry and, while it is in flight, its pop."""

    entry: QueueEntry
    pop_id: str | None = None
    held_until: datetime | None = None

    @property
    def place(self) -> tuple[int, int, GenerationId]:
        return self.entry.priority_class.rank, to_ms(self.entry.arrived_at), self.entry.generation_id


class MemoryAdmissionQueue:
    """The queue in one process's memory; it starts without its marker. `clock` gives the aware time.

    Faults for tests: `is_reachable = False` makes every call raise, `lose_all()` empties it, marker included.
    """

    def __init__(self, clock: Callable[[], datetime], settings: QueueSettings | None = None) -> None:
        self._clock = clock
        self._settings = settings or QueueSettings()
        self._slots_by_model: dict[ModelKey, dict[GenerationId, _Slot]] = {}
        self._has_marker = False
        self.is_reachable = True

    def lose_all(self) -> None:
        self._slots_by_model.clear()
        self._has_marker = False

    async def enqueue_many(self, entries: Sequence[QueueEntry], *, is_bounded: bool) -> list[EnqueueStatus]:
        if is_bounded:
            self._check_ready()
        else:
            self._check_reachable()
        return [self._enqueue(entry, is_bounded=is_bounded) for entry in entries]

    async def pop(self, model_key: ModelKey, room: Room) -> list[Popped]:
        self._check_ready()
        now = self._clock()
        slots = self._slots(model_key)
        popped: list[Popped] = []
        num_tokens, num_charged = 0, 0
        for slot in sorted((slot for slot in slots.values() if slot.pop_id is None), key=lambda slot: slot.place):
            entry = slot.entry
            if len(popped) >= room.max_entries:
                break
            if entry.deadline_at is not None and entry.deadline_at <= now:
                del slots[entry.generation_id]
                continue
            if num_charged + entry.is_charged > room.max_charged and entry.is_charged:
                continue
            if num_tokens + entry.max_tokens > room.max_tokens[entry.priority_class.rank]:
                break
            num_tokens += entry.max_tokens
            num_charged += entry.is_charged
            slot.pop_id, slot.held_until = uuid.uuid4().hex, now + self._settings.pop_hold
            popped.append(Popped(entry=entry, pop_id=slot.pop_id))
        return popped

    async def ack_many(self, popped: Sequence[Popped]) -> None:
        self._check_ready()
        for pop in popped:
            if self._find_popped(pop) is not None:
                del self._slots(pop.entry.model_key)[pop.entry.generation_id]

    async def return_many(self, popped: Sequence[Popped]) -> None:
        self._check_ready()
        for pop in popped:
            slot = self._find_popped(pop)
            if slot is not None:
                slot.pop_id = slot.held_until = None

    async def remove_many(self, items: Sequence[tuple[ModelKey, GenerationId]]) -> None:
        self._check_ready()
        for model_key, generation_id in items:
            self._slots(model_key).pop(generation_id, None)

    async def contains_many(self, items: Sequence[tuple[ModelKey, GenerationId, int]]) -> list[bool]:
        self._check_ready()
        found = [(self._slots(model_key).get(generation_id), attempt) for model_key, generation_id, attempt in items]
        return [slot is not None and slot.entry.attempt == attempt for slot, attempt in found]

    async def reap_in_flight(self, model_keys: Sequence[ModelKey]) -> int:
        self._check_ready()
        now = self._clock()
        slots = [slot for model_key in set(model_keys) for slot in self._slots(model_key).values()]
        overdue = [slot for slot in slots if slot.held_until is not None and slot.held_until <= now]
        for slot in overdue:
            slot.pop_id = slot.held_until = None
        return len(overdue)

    async def depth(self, model_key: ModelKey) -> dict[PriorityClass, int]:
        self._check_ready()
        return {each: self._num_queued(model_key, each) for each in PriorityClass}

    async def is_ready(self) -> bool:
        self._check_reachable()
        return self._has_marker

    async def mark_ready(self) -> None:
        self._check_reachable()
        self._has_marker = True

    def _enqueue(self, entry: QueueEntry, *, is_bounded: bool) -> EnqueueStatus:
        slots = self._slots(entry.model_key)
        known = slots.get(entry.generation_id)
        if known is not None and known.entry.attempt >= entry.attempt:
            return EnqueueStatus.PRESENT
        num_queued = self._num_queued(entry.model_key, entry.priority_class)
        if known is not None and known.pop_id is None and known.entry.priority_class is entry.priority_class:
            num_queued -= 1
        if is_bounded and num_queued >= self._settings.max_entries:
            return EnqueueStatus.FULL
        slots[entry.generation_id] = _Slot(entry=entry)
        return EnqueueStatus.ADDED

    def _slots(self, model_key: ModelKey) -> dict[GenerationId, _Slot]:
        return self._slots_by_model.setdefault(model_key, {})

    def _num_queued(self, model_key: ModelKey, priority_class: PriorityClass) -> int:
        slots = self._slots(model_key).values()
        return sum(slot.pop_id is None and slot.entry.priority_class is priority_class for slot in slots)

    def _find_popped(self, pop: Popped) -> _Slot | None:
        slot = self._slots(pop.entry.model_key).get(pop.entry.generation_id)
        return slot if slot is not None and slot.pop_id == pop.pop_id else None

    def _check_ready(self) -> None:
        self._check_reachable()
        if not self._has_marker:
            raise QueueNotReadyError("the queue was emptied and is not rebuilt yet")

    def _check_reachable(self) -> None:
        if not self.is_reachable:
            raise QueueUnavailableError("the queue cannot be reached")
