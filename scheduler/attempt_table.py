"""What a session is expected to run, and what its worker says it runs. No I/O; the clock's value is passed in."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from opentelemetry.trace import Span

from scheduler.queue.port import ByClass
from service_kit.ids import GenerationId
from state_store.model import GenerationRecord, PriorityClass
from state_store.ports import AttemptRef

MAX_CANCELLED_EARLY = 256
NAMING_DEADLINE_S = 2.0
"""A granted attempt that the worker does not name within this time is assigned once more, then lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldAttempt:
    """An attempt as its worker names it in hello and heartbeats."""

    ref: AttemptRef
    position: int
    is_finished: bool


@dataclass(slots=True, kw_only=True)
class ExpectedAttempt:
    """A granted attempt of this session. `context_tokens` is what it occupies before it produces anything."""

    record: GenerationRecord
    context_tokens: int
    tokens_to_fill: int
    """Of these, what its worker is expected to compute before its first token: the rest is cached there."""
    expected_since_s: float
    span: Span
    is_urgent: bool = False
    """Whether it is one of the highest class for as long as this attempt lasts."""
    is_seen: bool = False
    is_assigned: bool = False
    is_reassigned: bool = False
    is_cancel_wanted: bool = False
    has_added: bool = False
    """Whether it has added a token, as far as is known here."""

    @property
    def ref(self) -> AttemptRef:
        return AttemptRef(generation_id=self.record.generation_id, attempt=self.record.attempt)

    @property
    def rank(self) -> int:
        """Of the class it counts for."""
        return 0 if self.is_urgent else self.record.priority_class.rank


class Overdue(StrEnum):
    """What to do with an attempt that its worker has not named in time."""

    ASSIGN_AGAIN = "ASSIGN_AGAIN"
    LOSE = "LOSE"


@dataclass(slots=True)
class AttemptTable:
    """Owner of a session's expected attempts."""

    _by_generation: dict[GenerationId, ExpectedAttempt] = field(default_factory=dict)
    _reported: frozenset[AttemptRef] = frozenset()
    """Attempts whose memory the latest load report counts."""
    _cancelled_early: deque[AttemptRef] = field(default_factory=lambda: deque(maxlen=MAX_CANCELLED_EARLY))

    def __len__(self) -> int:
        return len(self._by_generation)

    def expect(self, attempt: ExpectedAttempt) -> None:
        """Adds a granted attempt; a higher attempt of the same generation replaces a lower one."""
        known = self._by_generation.get(attempt.record.generation_id)
        if known is not None:
            if known.record.attempt >= attempt.record.attempt:
                attempt.span.end()
                return
            known.span.end()
        attempt.is_cancel_wanted |= attempt.ref in self._cancelled_early
        self._by_generation[attempt.record.generation_id] = attempt

    def want_cancel(self, ref: AttemptRef) -> ExpectedAttempt | None:
        """Notes the wish; None where the attempt is not expected. Its grant may be committed and its scheduler not know it
        yet: then the wish waits for it. Of more than it keeps, the oldest is left to the next comparison with Postgres."""
        if (known := self.find(ref)) is None:
            self._cancelled_early.append(ref)
        else:
            known.is_cancel_wanted = True
        return known

    def find(self, ref: AttemptRef) -> ExpectedAttempt | None:
        known = self._by_generation.get(ref.generation_id)
        return known if known is not None and known.record.attempt == ref.attempt else None

    def forget(self, ref: AttemptRef) -> None:
        """The attempt is over, or is somebody else's now."""
        if (known := self.find(ref)) is not None:
            known.span.end()
            del self._by_generation[ref.generation_id]

    def clear(self) -> None:
        for known in self._by_generation.values():
            known.span.end()
        self._by_generation.clear()

    def note_named(self, held: Sequence[HeldAttempt]) -> list[HeldAttempt]:
        """Marks what the worker names as seen; returns what it names and nobody expects."""
        unknown = []
        for attempt in held:
            if (known := self.find(attempt.ref)) is None:
                unknown.append(attempt)
            else:
                known.is_seen = True
        return unknown

    def note_unnamed(self, held: Sequence[HeldAttempt], now_s: float) -> None:
        """A heartbeat names everything that its worker holds. What was seen before and is not in it is gone from there,
        and overdue from now on: it was aborted over a log that is closed, or it ended while it was being adopted."""
        named = {attempt.ref for attempt in held}
        for known in self._by_generation.values():
            if known.is_seen and known.ref not in named:
                known.is_seen, known.expected_since_s = False, now_s

    def note_reported(self, held: Sequence[HeldAttempt], *, num_in_engine: int) -> None:
        """Takes what a worker names together with how many sequences its load report counts. The report is as old as the
        engine's last step: the attempts that came last, beyond that number, do not show in it yet."""
        live = [attempt.ref for attempt in held if not attempt.is_finished]
        finished = [attempt.ref for attempt in held if attempt.is_finished]
        self._reported = frozenset([*live[:num_in_engine], *finished])

    def note_produced(self, refs: Iterable[AttemptRef]) -> None:
        for ref in refs:
            if (known := self.find(ref)) is not None:
                known.is_seen = True

    def note_added(self, ref: AttemptRef) -> bool:
        """The attempt has added a token; True when that clears it of suspicion."""
        known = self.find(ref)
        if known is None or known.has_added:
            return False
        known.has_added = True
        return known.record.charged_attempts > 0

    def has_suspect(self) -> bool:
        """Whether a generation runs here that was charged and has not added a token since: no second one may join it, so
        that the next crash tells which it was."""
        return any(known.record.charged_attempts and not known.has_added for known in self._by_generation.values())

    def num_outstanding(self) -> ByClass:
        """Attempts by class."""
        return _sum_by_class((known, 1) for known in self._by_generation.values())

    def unseen_tokens(self) -> ByClass:
        """Context of what was dispatched and does not show in the worker's load report yet, by class."""
        return _sum_by_class(
            (known, known.context_tokens) for known in self._by_generation.values() if known.ref not in self._reported
        )

    def tokens_to_fill(self) -> ByClass:
        """What is still to be computed of those that have made no token yet, by class."""
        return _sum_by_class(
            (known, known.tokens_to_fill) for known in self._by_generation.values() if not known.has_added
        )

    def overdue(self, now_s: float) -> list[tuple[ExpectedAttempt, Overdue]]:
        """Attempts not named in time. The caller assigns again (the time starts anew) or gives the attempt back."""
        due = []
        for known in self._by_generation.values():
            if known.is_seen or now_s - known.expected_since_s < NAMING_DEADLINE_S:
                continue
            due.append((known, Overdue.LOSE if known.is_reassigned else Overdue.ASSIGN_AGAIN))
        return due

    def missing_at_hello(self, held: Sequence[HeldAttempt]) -> list[ExpectedAttempt]:
        """Expected attempts that a worker does not name on a new stream. No assignment of an older stream can still
        reach it, so they are to be assigned again at once."""
        named = {attempt.ref for attempt in held}
        return [known for known in self._by_generation.values() if known.ref not in named]

    def all(self) -> list[ExpectedAttempt]:
        return list(self._by_generation.values())


def _sum_by_class(parts: Iterable[tuple[ExpectedAttempt, int]]) -> ByClass:
    sums = [0] * len(PriorityClass)
    for attempt, number in parts:
        sums[attempt.rank] += number
    interactive, standard, batch = sums
    return interactive, standard, batch
