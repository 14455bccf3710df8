"""Which entries a pop takes. Pure; the same decisions stand in lua/pop.lua, step for step."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from scheduler.queue.codec import duration_us
from scheduler.queue.model_queue import NUM_CLASSES, Lane, ModelQueue, Place, Slot
from scheduler.queue.port import Popped, SessionRoom
from scheduler.queue.settings import QueueSettings
from service_kit.ids import GenerationId, SessionId

TURN = 8
"""One of so many entries popped may go out of class order."""


@dataclass(frozen=True, slots=True)
class _Wish:
    """What asks for room: a lane's entries, or one of them. `rank` is what it is judged by: 0 for what goes as urgent."""

    rank: int
    is_charged: bool
    slot: Slot | None = None
    is_aged: bool = False
    """Whether it comes by the rule of age: then the earmark of a younger one is no obstacle."""


@dataclass(slots=True)
class _OpenRoom:
    """A session's room and what this pop has taken of it. `earmark_rank` is 0 while the earmark's entry starves."""

    room: SessionRoom
    earmark: Slot | None = None
    earmark_rank: int = 0
    num_popped: int = 0
    tokens_popped: int = 0
    num_charged: int = 0

    def is_open(self, wish: _Wish) -> bool:
        """Whether the session could take this entry, or one of this lane, if it were small enough."""
        if self.num_popped >= self.room.max_entries[wish.rank]:
            return False
        if wish.is_charged and self.num_charged >= self.room.max_charged:
            return False
        if self.earmark is None or wish.rank < self.earmark_rank or wish.slot is self.earmark:
            return True
        is_starving = self.earmark_rank < self.earmark.rank
        return wish.is_aged and not is_starving and (wish.slot is None or wish.slot.arrival < self.earmark.arrival)

    def tokens_left(self, rank: int) -> int:
        return self.room.max_tokens[rank] - self.tokens_popped

    def fits(self, slot: Slot, wish: _Wish) -> bool:
        return self.is_open(wish) and slot.entry.max_tokens <= self.tokens_left(wish.rank)

    def could_hold(self, slot: Slot) -> bool:
        """When it is empty."""
        return self.room.capacity_tokens >= slot.entry.max_tokens and (
            not slot.entry.is_charged or self.room.max_charged > 0
        )


@dataclass(slots=True)
class _Looks:
    """What this pop has looked past of one class: none uses up another's."""

    num_passed_by_tenant: Counter[str] = field(default_factory=Counter)
    num_oversized: int = 0
    closed_tenants: set[str] = field(default_factory=set)
    is_over: bool = False


def kept_from(rank: int, kept: Iterable[tuple[SessionId, int]]) -> frozenset[SessionId]:
    """The sessions, of those that are kept for an entry of a rank, that may not take one of this rank."""
    return frozenset(session_id for session_id, earmark_rank in kept if rank >= earmark_rank)


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
        self._looks = [_Looks() for _ in range(NUM_CLASSES)]
        self._starving: Slot | None = None
        """The first that was looked past and starves."""

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
        kept = [(room.room.session_id, room.earmark_rank) for room in self._rooms if room.earmark is not None]
        return [replace(popped, kept=kept_from(popped.rank, kept)) for popped in self._popped]

    def _open(self, room: SessionRoom) -> _OpenRoom:
        generation_id = self._queue.earmarks.entry_by_session.get(room.session_id)
        if generation_id is None:
            return _OpenRoom(room)
        self._queue.earmarks.set(room.session_id, generation_id, self._earmark_until_us())
        slot = self._queue.slots[generation_id]
        return _OpenRoom(room, earmark=slot, earmark_rank=self._rank_of(slot, slot.rank))

    def _rank_of(self, slot: Slot, rank: int) -> int:
        """0 for the entry that starves."""
        return 0 if self._queue.earmarks.starving == slot.entry.generation_id else rank

    def _pick(self) -> bool:
        self._keep_for_starving()
        if self._queue.turn == TURN - 1 and self._pick_aged():
            return True
        return any(self._pick_earmarked(rank) or self._pick_of_class(rank) for rank in range(NUM_CLASSES))

    def _pick_aged(self) -> bool:
        """The oldest that has waited beyond its class's threshold; as urgent while one of a higher class waits."""
        highest = min((rank for (rank, _), places in self._queue.arrivals.items() if places), default=0)
        while True:
            aged: list[tuple[Place, Slot]] = []
            for rank, is_charged in _lanes(range(NUM_CLASSES)):
                if not self._is_open(_Wish(0 if rank > highest else rank, is_charged, is_aged=True)):
                    continue
                arrivals = self._queue.arrivals[rank, is_charged]
                place = next((p for p in arrivals if p[1] not in self._passed), None)
                if place is not None and place[0] + duration_us(self._settings.wait_thresholds[rank]) <= self._now_us:
                    aged.append((place, self._queue.slots[place[1]]))
            if not aged:
                return False
            oldest = min(aged, key=lambda item: item[0])[1]
            verdict = self._try(oldest, 0 if oldest.rank > highest else oldest.rank, is_aged=True)
            if verdict is not _Verdict.PASSED:
                return verdict is _Verdict.TAKEN

    def _pick_earmarked(self, rank: int) -> bool:
        """What a session was kept for goes first of its class, as soon as it fits there; what starves, of all."""
        for room in self._rooms:
            slot = room.earmark
            if slot is not None and room.earmark_rank == rank and room.fits(slot, _wish_of(slot, rank)):
                self._take(slot, room, rank)
                return True
        return False

    def _pick_of_class(self, rank: int) -> bool:
        """The tenant with the smallest counter, its earliest entry; heads that do not fit are looked past."""
        while not self._looks[rank].is_over:
            slot = self._next_head(rank)
            if slot is None:
                return False
            if self._try(slot, rank) is _Verdict.TAKEN:
                return True
        return False

    def _next_head(self, rank: int) -> Slot | None:
        heads: list[tuple[tuple[int, str, Place], Slot]] = []
        for lane in _lanes([rank]):
            if not self._is_open(_Wish(*lane)):
                continue
            for tenant, places in self._queue.waiting[lane].items():
                if tenant in self._looks[rank].closed_tenants:
                    continue
                place = next((p for p in places if p[1] not in self._passed), None)
                if place is not None:
                    key = self._queue.counters.active[tenant], tenant, place
                    heads.append((key, self._queue.slots[place[1]]))
        return min(heads, key=lambda head: head[0])[1] if heads else None

    def _is_open(self, wish: _Wish) -> bool:
        return any(room.is_open(wish) for room in self._rooms)

    def _try(self, slot: Slot, rank: int, *, is_aged: bool = False) -> _Verdict:
        rank = self._rank_of(slot, rank)
        wish = _wish_of(slot, rank, is_aged=is_aged)
        fitting = [room for room in self._rooms if room.fits(slot, wish)]
        if fitting:
            self._take(slot, max(fitting, key=lambda room: room.tokens_left(rank)), rank)  # the first of equals
            return _Verdict.TAKEN
        looks = self._looks[slot.rank]
        if slot.entry.max_tokens > max((room.room.capacity_tokens for room in self._rooms), default=0):
            return self._try_to_pass_oversized(slot, looks)
        if looks.num_passed_by_tenant.total() >= self._settings.max_passed:
            looks.is_over = True
            return _Verdict.CLOSED
        if looks.num_passed_by_tenant[slot.tenant] >= self._settings.max_passed_of_tenant:
            looks.closed_tenants.add(slot.tenant)
            return _Verdict.CLOSED
        looks.num_passed_by_tenant[slot.tenant] += 1
        self._pass(slot)
        return _Verdict.PASSED

    def _try_to_pass_oversized(self, slot: Slot, looks: _Looks) -> _Verdict:
        """What would fit none of these sessions even when empty waits for another one, and must not block them."""
        looks.num_oversized += 1
        if looks.num_oversized > self._settings.max_oversized:
            # Who waits for the other session must not keep these from the tenants that do not.
            looks.closed_tenants.add(slot.tenant)
            looks.is_over = looks.num_oversized >= 2 * self._settings.max_oversized
            return _Verdict.CLOSED
        self._pass(slot)
        return _Verdict.PASSED

    def _pass(self, slot: Slot) -> None:
        generation_id = slot.entry.generation_id
        self._passed.add(generation_id)
        skipped_us = self._now_us - self._queue.skipped_since_us.setdefault(generation_id, self._now_us)
        able = [room for room in self._rooms if room.could_hold(slot)]
        if skipped_us >= duration_us(self._settings.skip_patience) and not self._queue.earmarks.has_entry(
            generation_id
        ):
            self._earmark(slot, [room for room in able if room.earmark is None], slot.rank)
        is_starving = slot.rank > 0 and skipped_us >= duration_us(self._settings.starving_after)
        if is_starving and able and self._starving is None:
            self._starving = slot
            self._keep_for_starving()

    def _earmark(self, slot: Slot, able: Sequence[_OpenRoom], rank: int) -> bool:
        """Keeps the session with most tokens left, of these; False without any."""
        if not able:
            return False
        room = max(able, key=lambda room: room.tokens_left(rank))
        room.earmark, room.earmark_rank = slot, rank
        self._queue.earmarks.set(room.room.session_id, slot.entry.generation_id, self._earmark_until_us())
        return True

    def _keep_for_starving(self) -> None:
        """When it is the turn of age, what starves gets its session, closed to all others and with a place left for it. One
        of a model at a time: the classes above get 7 of 8 even while many starve."""
        slot, earmarks = self._starving, self._queue.earmarks
        if slot is None or self._queue.turn != TURN - 1 or earmarks.starving is not None:
            return
        able = [room for room in self._rooms if room.could_hold(slot) and room.num_popped < room.room.max_entries[0]]
        own, free = ([room for room in able if room.earmark is mark] for mark in (slot, None))
        if own or free or able:
            earmarks.release_entry(slot.entry.generation_id)
            for room in self._rooms:
                if room.earmark is slot:
                    room.earmark = None
            self._earmark(slot, own or free or able, 0)
            earmarks.starving = slot.entry.generation_id

    def _take(self, slot: Slot, room: _OpenRoom, rank: int) -> None:
        queue, entry = self._queue, slot.entry
        for other in self._rooms:
            if other.earmark is slot:
                other.earmark = None
        if self._starving is slot:
            self._starving = None
        room.num_popped += 1
        room.tokens_popped += entry.max_tokens
        room.num_charged += entry.is_charged
        pop_id = f"{self._pop_id}:{len(self._popped)}"
        queue.take(slot, pop_id=pop_id, held_until_us=self._now_us + duration_us(self._settings.pop_hold))
        queue.turn = (queue.turn + 1) % TURN
        queue.pops = queue.pops.plus_one(self._now_us)
        popped = Popped(entry=entry, pop_id=pop_id, session_id=room.room.session_id, is_urgent=rank < slot.rank)
        self._popped.append(popped)

    def _earmark_until_us(self) -> int:
        return self._now_us + duration_us(self._settings.earmark_lease)


def _wish_of(slot: Slot, rank: int, *, is_aged: bool = False) -> _Wish:
    return _Wish(rank, slot.entry.is_charged, slot, is_aged)


def _lanes(ranks: Sequence[int]) -> list[Lane]:
    return [(rank, is_charged) for rank in ranks for is_charged in (False, True)]
