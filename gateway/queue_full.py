"""What the schedulers said about full queues, remembered for a moment."""

from collections.abc import Callable
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
    """One queue of the schedulers; with a tenant, that tenant's part of it."""

    revision: str
    priority_class: PriorityClass
    tenant_id: TenantId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    subject: str
    until: datetime


class FullQueues:
    """Refuses cheaply, before a prompt is encoded, what a scheduler has just refused. Mutable state: a refusal per full
    queue and tenant, at most 10,000: what comes beyond asks the scheduler."""

    def __init__(self, *, now: Callable[[], datetime]) -> None:
        self._now = now
        self._refusals: dict[QueueName, _Refusal] = {}

    def note(self, revision: str, priority_class: PriorityClass, tenant_id: TenantId, error: FullError) -> None:
        """Remembers a refusal when it is about the queue, or the tenant's part of it. One over the queue's prompt tokens
        is not: it says nothing about shorter prompts."""
        now = self._now()
        until = now + min(error.retry_after, _MAX_REMEMBERED)
        if error.reason == Reason.QUEUE_FULL:
            if error.metadata.get("bound") != QueueBound.REQUESTS:
                return
            refusal = _Refusal(subject="", until=until)
            self._refusals[QueueName(revision=revision, priority_class=priority_class)] = refusal
        elif error.reason == Reason.TENANT_QUEUE_FULL and isinstance(error, QuotaExceededError):
            if len(self._refusals) >= _MAX_ENTRIES:
                self._refusals = {name: each for name, each in self._refusals.items() if now < each.until}
            if len(self._refusals) < _MAX_ENTRIES:
                name = QueueName(revision=revision, priority_class=priority_class, tenant_id=tenant_id)
                self._refusals[name] = _Refusal(subject=error.subject, until=until)

    def refusal(self, revision: str, priority_class: PriorityClass, tenant_id: TenantId) -> FullError | None:
        """The error for a call of this tenant; None while nothing is known to be full."""
        everybodys = self._known(QueueName(revision=revision, priority_class=priority_class))
        if everybodys is not None:
            return UnavailableError(
                "the queue is full",
                reason=Reason.QUEUE_FULL,
                retry_after=self._wait(everybodys),
                metadata={"bound": QueueBound.REQUESTS.value},
            )
        own = self._known(QueueName(revision=revision, priority_class=priority_class, tenant_id=tenant_id))
        if own is None:
            return None
        return QuotaExceededError(
            "the tenant's part of the queue is full",
            subject=own.subject,
            reason=Reason.TENANT_QUEUE_FULL,
            retry_after=self._wait(own),
        )

    def _known(self, name: QueueName) -> _Refusal | None:
        refusal = self._refusals.get(name)
        if refusal is not None and self._now() >= refusal.until:
            del self._refusals[name]
            return None
        return refusal

    def _wait(self, refusal: _Refusal) -> timedelta:
        return refusal.until - self._now()
