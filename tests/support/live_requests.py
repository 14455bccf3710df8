"""What a live request is to the queue, from what was asked for and what has happened to it: a model that knows no row."""

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from scheduler.queue.codec import to_us
from scheduler.queue.port import Popped, QueueEntry
from service_kit.delta import Cursor
from service_kit.ids import GenerationId
from state_store.tenants import ApiKey
from tests.support.queue_keys import Live

MAX_CHARGED = 3
MAX_ATTEMPTS = 20


@dataclass(slots=True, kw_only=True)
class Request:
    """`attempt` counts the grants; `said` are the tokens that its workers have said, up to `cursor`, and `added` those of
    this attempt."""

    key: ApiKey
    entry: QueueEntry
    """As it was queued last."""
    max_output: int
    queue_deadline_at: datetime
    deadline_at: datetime | None
    is_running: bool = False
    is_cancelled: bool = False
    is_queued: bool = True
    """Whether it was put into the queue, which knows nothing of what was only committed."""
    queued_at: datetime
    pop: Popped | None = None
    held_until: datetime | None = None
    num_charged: int = 0
    attempt: int = 0
    said: int = 0
    added: int = 0
    cursor: Cursor = field(default_factory=Cursor)

    @property
    def generation_id(self) -> GenerationId:
        return self.entry.generation_id

    @property
    def expires_at(self) -> datetime | None:
        """While it is queued."""
        limits = [self.deadline_at, self.queue_deadline_at if self.attempt == 0 else None]
        return min((limit for limit in limits if limit is not None), default=None)

    def is_overdue(self, now: datetime) -> bool:
        limit = self.deadline_at if self.is_running else self.expires_at
        return limit is not None and limit <= now

    def live_entry(self, now: datetime) -> Live | None:
        """As the queue should hold it behind a pop; None where it should not."""
        if self.is_running or not self.is_queued or (self.pop is None and self.is_overdue(now)):
            return None
        if self.pop is not None:
            assert self.held_until is not None
            return Live(entry=self.entry, pop_id=self.pop.pop_id, held_until_us=to_us(self.held_until))
        ready_at = self.entry.ready_at
        return Live(entry=self.entry, is_delayed=ready_at is not None and ready_at > now)

    @property
    def is_exhausted(self) -> bool:
        return self.num_charged >= MAX_CHARGED or self.attempt >= MAX_ATTEMPTS

    def land(self) -> None:
        """Its pop came to nothing."""
        self.pop = self.held_until = None

    def grant(self) -> None:
        self.is_running, self.attempt, self.added = True, self.attempt + 1, 0

    def say(self, end: Cursor, num_tokens: int) -> None:
        self.cursor, self.said, self.added = end, self.said + num_tokens, self.added + num_tokens

    def requeue(self, now: datetime, *, is_charged: bool) -> None:
        """Its worker was lost."""
        self.num_charged += is_charged
        self.is_running, self.queued_at = False, now
        self.entry = replace(
            self.entry,
            attempt=self.attempt,
            max_tokens=self.entry.prompt_tokens + self.said + 1,
            deadline_at=self.deadline_at,
            ready_at=now + timedelta(seconds=1 << (self.num_charged - 1)) if is_charged else None,
            is_charged=self.num_charged > 0,
        )
