"""Typed errors of the domain. Pure: which gRPC status each becomes stands in one table, `service_kit.rpc_status`.

Every error has exactly one reason: the constant word of its ErrorInfo (domain "sluice"), the same in logs and records.
Lower layers subclass these types; nobody below the servicers builds a status.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import ClassVar

ERROR_DOMAIN = "sluice"
DEFAULT_RETRY_AFTER = timedelta(seconds=1)


class Reason(StrEnum):
    """Constant words that clients may branch on."""

    INVALID_API_KEY = "INVALID_API_KEY"
    ADMIN_KEY_REQUIRED = "ADMIN_KEY_REQUIRED"
    INVALID_FIELD = "INVALID_FIELD"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    TOO_MANY_BAD_KEYS = "TOO_MANY_BAD_KEYS"
    TENANT_QUEUE_FULL = "TENANT_QUEUE_FULL"
    QUEUE_FULL = "QUEUE_FULL"
    DRAINING = "DRAINING"
    STORE_UNAVAILABLE = "STORE_UNAVAILABLE"
    NO_SCHEDULER = "NO_SCHEDULER"
    NO_WORKER = "NO_WORKER"
    UNAVAILABLE = "UNAVAILABLE"
    REQUEST_ID_REUSED = "REQUEST_ID_REUSED"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    GENERATION_NOT_FOUND = "GENERATION_NOT_FOUND"
    TENANT_NOT_FOUND = "TENANT_NOT_FOUND"
    KEY_NOT_FOUND = "KEY_NOT_FOUND"
    TENANT_EXISTS = "TENANT_EXISTS"
    KEY_EXISTS = "KEY_EXISTS"
    CURSOR_BEYOND_END = "CURSOR_BEYOND_END"
    OUTPUT_NOT_KEPT = "OUTPUT_NOT_KEPT"
    QUEUE_TIMEOUT = "QUEUE_TIMEOUT"
    DEADLINE = "DEADLINE"
    ATTEMPTS_EXHAUSTED = "ATTEMPTS_EXHAUSTED"
    ENGINE_FAILURE = "ENGINE_FAILURE"
    STALE_LEASE = "STALE_LEASE"
    ILLEGAL_TRANSITION = "ILLEGAL_TRANSITION"
    WORKER_DIFFERS = "WORKER_DIFFERS"
    OUTPUT_CONTRADICTED = "OUTPUT_CONTRADICTED"
    INTERNAL = "INTERNAL"


class QueueBound(StrEnum):
    """Which bound a QUEUE_FULL or TENANT_QUEUE_FULL is about: `bound` in its metadata."""

    REQUESTS = "requests"
    """Nobody has a place."""
    PROMPT_TOKENS = "prompt_tokens"
    """A shorter prompt may have one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldViolation:
    """One bad field, named by its path in the proto ("spec.sampling.top_p")."""

    field: str
    description: str


class SluiceError(Exception):
    """Base of all errors that a caller is told about. `metadata` goes into the ErrorInfo: ids and limits, never text."""

    default_reason: ClassVar[str] = Reason.INTERNAL

    def __init__(self, message: str, *, reason: str | None = None, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason: str = str(reason or self.default_reason)
        self.metadata: dict[str, str] = dict(metadata or {})


class UnauthenticatedError(SluiceError):
    """No API key, or one that is unknown, expired or revoked. Never says which."""

    default_reason = Reason.INVALID_API_KEY


class PermissionDeniedError(SluiceError):
    """An administrative call without an administrative key."""

    default_reason = Reason.ADMIN_KEY_REQUIRED


class InvalidArgumentError(SluiceError):
    """Bad fields. Nothing was committed; the same call fails again."""

    default_reason = Reason.INVALID_FIELD

    def __init__(
        self,
        field: str,
        description: str,
        *,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
        more: Sequence[FieldViolation] = (),
    ) -> None:
        super().__init__(f"{field}: {description}" if field else description, reason=reason, metadata=metadata)
        self.violations: tuple[FieldViolation, ...] = (FieldViolation(field=field, description=description), *more)

    @property
    def field(self) -> str:
        return self.violations[0].field


class RetryableError(SluiceError):
    """An error whose call may be repeated unchanged after `retry_after`."""

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        retry_after: timedelta = DEFAULT_RETRY_AFTER,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, reason=reason, metadata=metadata)
        self.retry_after = retry_after


class QuotaExceededError(RetryableError):
    """The tenant's own limit: rate, concurrency, tokens, or its own bound in the queue. `subject` names the limit."""

    default_reason = Reason.QUOTA_EXCEEDED

    def __init__(
        self,
        message: str,
        *,
        subject: str,
        reason: str | None = None,
        retry_after: timedelta = DEFAULT_RETRY_AFTER,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, reason=reason, retry_after=retry_after, metadata=metadata)
        self.subject = subject


class UnavailableError(RetryableError):
    """Nobody's fault in particular: a full queue, a drain, a store or peer that does not answer."""

    default_reason = Reason.UNAVAILABLE


class AlreadyExistsError(SluiceError):
    """A request id that stands for other arguments."""

    default_reason = Reason.REQUEST_ID_REUSED


class NotFoundError(SluiceError):
    """Unknown, not allowed, or another tenant's: the caller is not told which."""

    default_reason = Reason.GENERATION_NOT_FOUND


class OutOfRangeError(SluiceError):
    """A cursor beyond a finished end, or output that is no longer kept."""

    default_reason = Reason.CURSOR_BEYOND_END


class ExpiredError(SluiceError):
    """The generation ended as EXPIRED; the reason is QUEUE_TIMEOUT or DEADLINE."""

    default_reason = Reason.DEADLINE


class AbortedError(SluiceError):
    """A stale caller, or a generation whose attempts are used up."""

    default_reason = Reason.STALE_LEASE


class FailedPreconditionError(SluiceError):
    """A transition that its state machine does not have. Nothing was changed."""

    default_reason = Reason.ILLEGAL_TRANSITION


class WorkerDiffersError(FailedPreconditionError):
    """A worker that announced in `field` something else than the other live workers of its model. Nothing was changed; when
    those are gone, the same call succeeds."""

    default_reason = Reason.WORKER_DIFFERS

    def __init__(self, field: str, description: str, *, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{field}: {description}", metadata={**(metadata or {}), "field": field})
        self.field = field


class DataLossError(SluiceError):
    """Continuing would contradict what the reader was shown. Only this reader ends; the generation goes on."""

    default_reason = Reason.OUTPUT_CONTRADICTED


class InternalError(SluiceError):
    """Our bug. The text stays in the log; the caller gets the request id to report it with."""

    default_reason = Reason.INTERNAL
