"""Which entries a pop takes. Pure; the same decisions stand in lua/pop.lua, step for step."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from scheduler.queue.codec import duration_us
from scheduler.queue.model_queue import NUM_CLASSES, Lane, ModelQueue, Place, Slot
from scheduler.queue.port import Popped, QueueEntry, SessionRoom
from scheduler.queue.settings import QueueSettings
from service_kit.ids import GenerationId, SessionId

TURN = 8
"""One of so many entries popped may go out of class order."""


@dataclass(slots=True)
class _OpenRoom:
    """A session's room and what this pop has taken of it."""

    room: SessionRoom
    earmark: Slot | None = None
    num_popped: int = 0
    tokens_popped: int = 0
    num_charged: int = 0

    def is_open(self, slot_or_lane: Slot | Lane) -> bool:
        """Whether the session could take an entry of this lane (exactly this one) if it were small enough."""
        slot = slot_or_lane if isinstance(slot_or_lane, Slot) else None
        rank, is_charged = slot_or_lane.lane if isinstance(slot_or_lane, Slot) else slot_or_lane
        if self.num_popped >= self.room.max_entries[rank] or (is_charged and self.num_charged >= self.room.max_charged):
            return False
        return self.earmark is None or rank < self.earmark.rank or (slot is not None and slot is self.earmark)

    def tokens_left(self, rank: int) -> int:
        return self.room.max_tokens[rank] - self.tokens_popped

    def fits(self, slot: Slot) -> bool:
        return self.is_open(slot) and slot.entry.max_tokens <= self.tokens_left(slot.rank)


def kept_from(entry: QueueEntry, kept: Iterable[tuple[SessionId, int]]) -> frozenset[SessionId]:
    """The sessions, of those that are kept for an entry of a class given by its rank, that may not take this one."""
    return frozenset(session_id for session_id, rank in kept if entry.priority_class.rank >= rank)


class _Verdict(StrEnum):
    TAKEN = "TAKEN"
    PASSED = "PASSED"
    CLOSED = "CLOSED"
    """Does not fit and may not be looked past: its tenant has used up its part, or the pop has."""


class Selection:
    """One pop. `run` moves the entries and returns them in order."""

    def __init__(self, queue: ModelQueue, settings: QueueSettings, *, now_us: int, pop_id: str) -> None:
        self._queue = queue
        self._settings = settings
        self._now_us = now_us
        self._pop_id = pop_id
        self._rooms: list[_OpenRoom] = []
        self._popped: list[Popped] = []
        self._passed: set[GenerationId] = set()
        self._num_oversized = 0
        self._num_passed_by_tenant: Counter[str] = Counter()
        self._closed_tenants: set[str] = set()
        self._is_over = False

    def run(self, rooms: Sequence[SessionRoom], max_entries: int) -> list[Popped]:
        queue, now_us = self._queue, self._now_us
        queue.expire(now_us)
        queue.ripen(now_us)
        queue.earmarks.expire(now_us)
        self._rooms = [self._open(room) for room in rooms]
        while len(self._popped) < max_entries and self._pick():
            pass
        queue.counters.prune()
        queue.counters.rebase(self._settings.rebase_counters_at)
        kept = [(room.room.session_id, room.earmark.rank) for room in self._rooms if room.earmark is not None]
        return [replace(popped, kept=kept_from(popped.entry, kept)) for popped in self._popped]

    def _open(self, room: SessionRoom) -> _OpenRoom:
        generation_id = self._queue.earmarks.entry_by_session.get(room.session_id)
        if generation_id is None:
            return _OpenRoom(room)
        self._queue.earmarks.set(room.session_id, generation_id, self._earmark_until_us())
        return _OpenRoom(room, earmark=self._queue.slots[generation_id])

    def _pick(self) -> bool:
        if self._queue.turn == TURN - 1 and self._pick_aged():
            return True
        return any(self._pick_earmarked(rank) or self._pick_of_class(rank) for rank in range(NUM_CLASSES))

    def _pick_aged(self) -> bool:
        """The oldest that has waited beyond its class's threshold."""
        while True:
            aged: list[tuple[Place, Slot]] = []
            for lane in self._open_lanes(range(NUM_CLASSES)):
                place = next((p for p in self._queue.arrivals[lane] if p[1] not in self._passed), None)
                threshold_us = duration_us(self._settings.wait_thresholds[lane[0]])
                if place is not None and place[0] + threshold_us <= self._now_us:
                    aged.append((place, self._queue.slots[place[1]]))
            if not aged:
                return False
            verdict = self._try(min(aged, key=lambda item: item[0])[1])
            if verdict is not _Verdict.PASSED:
                return verdict is _Verdict.TAKEN

    def _pick_earmarked(self, rank: int) -> bool:
        """What a session was kept for goes first of its class, as soon as it fits there."""
        for room in self._rooms:
            if room.earmark is not None and room.earmark.rank == rank and room.fits(room.earmark):
                self._take(room.earmark, room)
                return True
        return False

    def _pick_of_class(self, rank: int) -> bool:
        """The tenant with the smallest counter, its earliest entry; heads that do not fit are looked past."""
        while not self._is_over:
            slot = self._next_head(rank)
            if slot is None:
                return False
            if self._try(slot) is _Verdict.TAKEN:
                return True
        return False

    def _next_head(self, rank: int) -> Slot | None:
        heads: list[tuple[tuple[int, str, Place], Slot]] = []
        for lane in self._open_lanes([rank]):
            for tenant, places in self._queue.waiting[lane].items():
                if tenant in self._closed_tenants:
                    continue
                place = next((p for p in places if p[1] not in self._passed), None)
                if place is not None:
                    key = self._queue.counters.active[tenant], tenant, place
                    heads.append((key, self._queue.slots[place[1]]))
        return min(heads, key=lambda head: head[0])[1] if heads else None

    def _open_lanes(self, ranks: Sequence[int]) -> list[Lane]:
        lanes = [(rank, is_charged) for rank in ranks for is_charged in (False, True)]
        return [lane for lane in lanes if any(room.is_open(lane) for room in self._rooms)]

    def _try(self, slot: Slot) -> _Verdict:
        fitting = [room for room in self._rooms if room.fits(slot)]
        if fitting:
            self._take(slot, max(fitting, key=lambda room: room.tokens_left(slot.rank)))  # the first of equals
            return _Verdict.TAKEN
        if slot.entry.max_tokens > max((room.room.capacity_tokens for room in self._rooms), default=0):
            return self._try_to_pass_oversized(slot)
        if self._num_passed_by_tenant.total() >= self._settings.max_passed:
            self._is_over = True
            return _Verdict.CLOSED
        if self._num_passed_by_tenant[slot.tenant] >= self._settings.max_passed_of_tenant:
            self._closed_tenants.add(slot.tenant)
            return _Verdict.CLOSED
        self._num_passed_by_tenant[slot.tenant] += 1
        self._pass(slot)
        return _Verdict.PASSED

    def _try_to_pass_oversized(self, slot: Slot) -> _Verdict:
        """What would fit none of these sessions even when empty waits for another one, and must not block them."""
        self._num_oversized += 1
        if self._num_oversized > self._settings.max_oversized:
            # Who waits for the other session must not keep these from the tenants that do not.
            self._closed_tenants.add(slot.tenant)
            self._is_over = self._num_oversized >= 2 * self._settings.max_oversized
            return _Verdict.CLOSED
        self._pass(slot)
        return _Verdict.PASSED

    def _pass(self, slot: Slot) -> None:
        generation_id = slot.entry.generation_id
        self._passed.add(generation_id)
        since_us = self._queue.skipped_since_us.setdefault(generation_id, self._now_us)
        is_due = self._now_us - since_us >= duration_us(self._settings.skip_patience)
        if is_due and not self._queue.earmarks.has_entry(generation_id):
            self._earmark(slot)

    def _earmark(self, slot: Slot) -> None:
        """Keeps the session with most tokens left, of those that could hold it when empty and are kept for nothing yet."""
        able = [
            room
            for room in self._rooms
            if room.earmark is None
            and room.room.capacity_tokens >= slot.entry.max_tokens
            and (not slot.entry.is_charged or room.room.max_charged > 0)
        ]
        if able:
            room = max(able, key=lambda room: room.tokens_left(slot.rank))
            room.earmark = slot
            self._queue.earmarks.set(room.room.session_id, slot.entry.generation_id, self._earmark_until_us())

    def _take(self, slot: Slot, room: _OpenRoom) -> None:
        queue, entry = self._queue, slot.entry
        for other in self._rooms:
            if other.earmark is slot:
                other.earmark = None
        room.num_popped += 1
        room.tokens_popped += entry.max_tokens
        room.num_charged += entry.is_charged
        pop_id = f"{self._pop_id}:{len(self._popped)}"
        queue.take(slot, pop_id=pop_id, held_until_us=self._now_us + duration_us(self._settings.pop_hold))
        queue.turn = (queue.turn + 1) % TURN
        queue.pops = queue.pops.plus_one(self._now_us)
        self._popped.append(Popped(entry=entry, pop_id=pop_id, session_id=room.room.session_id))

    def _earmark_until_us(self) -> int:
        return self._now_us + duration_us(self._settings.earmark_lease)
