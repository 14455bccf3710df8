"""What the schedulers said about room in their queues, remembered for a moment."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta

from service_kit.errors import QueueBound, QuotaExceededError, Reason, UnavailableError
from service_kit.ids import TenantId
from state_store.model import PriorityClass

_MAX_REMEMBERED = timedelta(seconds=1)
"""A queue drains; a longer wait is for the client, not for this memory."""
_MAX_ENTRIES = 10_000

FullError = QuotaExceededError | UnavailableError


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueName:
    """A tenant's part of one queue of the schedulers; without tenant, the whole queue."""

    revision: str
    priority_class: PriorityClass
    tenant_id: TenantId | None

    @property
    def whole(self) -> "QueueName":
        return QueueName(revision=self.revision, priority_class=self.priority_class, tenant_id=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """What a scheduler said beside a commit: requests that still fit behind it, into the whole queue and into the
    tenant's part; `retry_after` is when to ask again where none does."""

    queue: int
    tenant: int
    retry_after: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class _Room:
    places: int
    until: datetime


class QueueRooms:
    """Refuses cheaply, before a prompt is encoded, what a scheduler would refuse.

    Mutable state: the places of each queue and tenant's part, at most 10,000, and how many requests of this process ask for
    one at this moment. What is not known asks the scheduler: its word counts.
    """

    def __init__(self, *, now: Callable[[], datetime]) -> None:
        self._now = now
        self._rooms: dict[QueueName, _Room] = {}
        self._asking: Counter[QueueName] = Counter()

    @contextmanager
    def asking(self, name: QueueName) -> Iterator[None]:
        """While a request may take a place that nobody has counted yet."""
        parts = (name, name.whole)
        self._asking.update(parts)
        try:
            yield
        finally:
            self._asking.subtract(parts)
            for part in parts:
                if not self._asking[part]:
                    del self._asking[part]

    def note_places(self, name: QueueName, places: Places) -> None:
        """Remembers what was said beside a commit."""
        self._remember(name, places.tenant, places.retry_after)
        self._remember(name.whole, places.queue, places.retry_after)

    def note_refusal(self, name: QueueName, error: FullError) -> None:
        """Remembers a refusal when it is about the queue's requests, or those of the tenant's part of it. One over the
        prompt tokens is not: it says nothing about shorter prompts."""
        if error.metadata.get("bound") != QueueBound.REQUESTS:
            return
        if error.reason == Reason.QUEUE_FULL:
            self._remember(name.whole, 0, error.retry_after)
        elif error.reason == Reason.TENANT_QUEUE_FULL:
            self._remember(name, 0, error.retry_after)

    def refusal(self, name: QueueName) -> FullError | None:
        """The error for a call that wants a place there; None while the scheduler is to be asked."""
        wait = self._wait_for_place(name.whole)
        if wait is not None:
            return UnavailableError(
                "the queue is full",
                reason=Reason.QUEUE_FULL,
                retry_after=wait,
                metadata={"bound": QueueBound.REQUESTS.value},
            )
        wait = self._wait_for_place(name)
        if wait is None:
            return None
        return QuotaExceededError(
            "the tenant's part of the queue is full",
            subject=f"tenant:{name.tenant_id}:queue",
            reason=Reason.TENANT_QUEUE_FULL,
            retry_after=wait,
            metadata={"bound": QueueBound.REQUESTS.value},
        )

    def _remember(self, name: QueueName, places: int, retry_after: timedelta) -> None:
        now = self._now()
        if len(self._rooms) >= _MAX_ENTRIES and name not in self._rooms:
            self._rooms = {each: room for each, room in self._rooms.items() if now < room.until}
            if len(self._rooms) >= _MAX_ENTRIES:
                return
        self._rooms[name] = _Room(places=places, until=now + min(retry_after, _MAX_REMEMBERED))

    def _wait_for_place(self, name: QueueName) -> timedelta | None:
        """None while there is a place, or nothing is known."""
        room = self._rooms.get(name)
        if room is None or room.places > self._asking[name]:
            return None
        wait = room.until - self._now()
        if wait <= timedelta(0):
            del self._rooms[name]
            return None
        return wait
