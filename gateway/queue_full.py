"""What the schedulers said about full queues, remembered for as long as they said to wait."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from service_kit.errors import Reason, UnavailableError
from state_store.model import PriorityClass

_MAX_REMEMBERED = timedelta(seconds=2)
"""A queue drains; a longer wait is for the client, not for this memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueName:
    """One queue of the schedulers."""

    revision: str
    priority_class: PriorityClass


class FullQueues:
    """Refuses cheaply, before a prompt is encoded, what a scheduler has just refused. Mutable state: a deadline per queue;
    as many as there are models and classes."""

    def __init__(self, *, now: Callable[[], datetime]) -> None:
        self._now = now
        self._until: dict[QueueName, datetime] = {}

    def note(self, queue: QueueName, error: UnavailableError) -> None:
        """Remembers a refusal when it is about this queue."""
        if error.reason == Reason.QUEUE_FULL:
            self._until[queue] = self._now() + min(error.retry_after, _MAX_REMEMBERED)

    def is_full(self, queue: QueueName) -> bool:
        until = self._until.get(queue)
        if until is None:
            return False
        if self._now() < until:
            return True
        del self._until[queue]
        return False

    def refusal(self, queue: QueueName) -> UnavailableError:
        """The error for a queue that is full."""
        wait = self._until[queue] - self._now()
        return UnavailableError("the queue is full", reason=Reason.QUEUE_FULL, retry_after=wait)
