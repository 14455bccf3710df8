"""One model's queue in memory: where each entry is, and the counts that follow from it. Pure.

The same moves stand in lua/entries.lua, structure for structure.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass

from scheduler.queue.bounds import Load, PopCount
from scheduler.queue.codec import pop_cost_of, tenant_name, to_us
from scheduler.queue.earmarks import Earmarks
from scheduler.queue.fairness import TenantCounters
from scheduler.queue.port import QueueEntry
from service_kit.ids import GenerationId
from state_store.model import PriorityClass

NUM_CLASSES = len(PriorityClass)
Place = tuple[int, GenerationId]
"""Time in µs, then the id: sorts."""
Lane = tuple[int, bool]
"""Rank of the class, and whether its entries are charged: those are looked at only where a session may take one."""


@dataclass(slots=True)
class Slot:
    """An entry and where it is: in flight under a pop id, delayed, or waiting."""

    entry: QueueEntry
    pop_id: str | None = None
    held_until_us: int = 0
    is_delayed: bool = False

    @property
    def tenant(self) -> str:
        return tenant_name(self.entry.tenant_id)

    @property
    def rank(self) -> int:
        return self.entry.priority_class.rank

    @property
    def lane(self) -> Lane:
        return self.rank, self.entry.is_charged

    @property
    def order(self) -> Place:
        return to_us(self.entry.order_at), self.entry.generation_id

    @property
    def arrival(self) -> Place:
        return to_us(self.entry.arrived_at), self.entry.generation_id


class ModelQueue:
    """Owner of one model's entries, counters, skips and earmarks."""

    def __init__(self) -> None:
        self.slots: dict[GenerationId, Slot] = {}
        self.counters = TenantCounters()
        self.earmarks = Earmarks()
        self.skipped_since_us: dict[GenerationId, int] = {}
        self.pops = PopCount()
        self.turn = 0
        """Entries popped since the last one that might go out of class order, below 8."""
        self.by_rank = [Load() for _ in range(NUM_CLASSES)]
        self.by_tenant: defaultdict[str, Load] = defaultdict(Load)
        self.in_flight_by_tenant: defaultdict[str, int] = defaultdict(int)
        self.arrivals: defaultdict[Lane, list[Place]] = defaultdict(list)
        self.waiting: defaultdict[Lane, dict[str, list[Place]]] = defaultdict(dict)
        """By tenant, in their order; a tenant without waiting entries has no list."""

    def add(self, entry: QueueEntry, now_us: int) -> None:
        """Queues a new entry, aside while it is delayed."""
        slot = self.slots[entry.generation_id] = Slot(entry=entry)
        self.counters.activate(slot.tenant)
        self._count(slot, 1)
        slot.is_delayed = entry.ready_at is not None and to_us(entry.ready_at) > now_us
        if not slot.is_delayed:
            self.counters.lift(slot.tenant)
            self._begin_waiting(slot)

    def ripen(self, now_us: int) -> None:
        """Delayed entries whose time has come return to their place, by time and id."""
        delayed = [slot for slot in self.slots.values() if slot.is_delayed]
        for slot in sorted(delayed, key=_ready_place):
            if _ready_place(slot)[0] <= now_us:
                slot.is_delayed = False
                self.counters.lift(slot.tenant)
                self._begin_waiting(slot)

    def expire(self, now_us: int) -> None:
        """Queued entries whose deadline has passed leave, by deadline and id; what is in flight is the grant's to refuse."""
        expired = [
            (to_us(slot.entry.deadline_at), generation_id)
            for generation_id, slot in self.slots.items()
            if slot.entry.deadline_at is not None and slot.pop_id is None
        ]
        for deadline_us, generation_id in sorted(expired):
            if deadline_us <= now_us:
                self.discard(generation_id, is_refunded=False)

    def take(self, slot: Slot, *, pop_id: str, held_until_us: int) -> None:
        """A waiting entry goes in flight and is charged."""
        self._end_waiting(slot)
        self._count(slot, -1)
        slot.pop_id, slot.held_until_us = pop_id, held_until_us
        self.in_flight_by_tenant[slot.tenant] += 1
        self.counters.serve(slot.tenant, pop_cost_of(slot.entry))

    def put_back(self, slot: Slot) -> None:
        """An entry in flight returns to its old place, refunded and not lifted: it never left."""
        self._land(slot)
        self.counters.refund(slot.tenant, pop_cost_of(slot.entry))
        self._count(slot, 1)
        self._begin_waiting(slot)

    def discard(self, generation_id: GenerationId, *, is_refunded: bool) -> None:
        """An entry leaves every structure. Refunds what is in flight, if so asked."""
        slot = self.slots.pop(generation_id)
        if slot.pop_id is not None:
            self._land(slot)
            if is_refunded:
                self.counters.refund(slot.tenant, pop_cost_of(slot.entry))
        else:
            self._count(slot, -1)
            if not slot.is_delayed:
                self._end_waiting(slot)
        if slot.tenant not in self.by_tenant and slot.tenant not in self.in_flight_by_tenant:
            self.counters.settle(slot.tenant)

    def _begin_waiting(self, slot: Slot) -> None:
        insort(self.waiting[slot.lane].setdefault(slot.tenant, []), slot.order)
        insort(self.arrivals[slot.lane], slot.arrival)
        self.counters.begin_waiting(slot.tenant)

    def _end_waiting(self, slot: Slot) -> None:
        tenants = self.waiting[slot.lane]
        _remove_sorted(tenants[slot.tenant], slot.order)
        if not tenants[slot.tenant]:
            del tenants[slot.tenant]
        _remove_sorted(self.arrivals[slot.lane], slot.arrival)
        self.counters.end_waiting(slot.tenant)
        self.skipped_since_us.pop(slot.entry.generation_id, None)
        self.earmarks.release_entry(slot.entry.generation_id)

    def _land(self, slot: Slot) -> None:
        slot.pop_id = None
        self.in_flight_by_tenant[slot.tenant] -= 1
        if not self.in_flight_by_tenant[slot.tenant]:
            del self.in_flight_by_tenant[slot.tenant]

    def _count(self, slot: Slot, sign: int) -> None:
        for load in (self.by_rank[slot.rank], self.by_tenant[slot.tenant]):
            load.requests += sign
            load.prompt_tokens += sign * slot.entry.prompt_tokens
        if not self.by_tenant[slot.tenant].requests:
            del self.by_tenant[slot.tenant]


def _remove_sorted(places: list[Place], place: Place) -> None:
    index = bisect_left(places, place)
    assert places[index] == place
    del places[index]


def _ready_place(slot: Slot) -> Place:
    assert slot.entry.ready_at is not None
    return to_us(slot.entry.ready_at), slot.entry.generation_id
