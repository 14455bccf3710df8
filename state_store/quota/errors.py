"""Errors of the quotas. Pure."""

from datetime import timedelta

from service_kit.errors import QuotaExceededError, Reason, UnavailableError
from state_store.quota.port import QuotaStanding


class QuotaUnavailableError(UnavailableError):
    """The server of the counts cannot be reached. It is not known whether the call took effect; repeating is safe."""

    default_reason = Reason.STORE_UNAVAILABLE


class QuotaNotReadyError(UnavailableError):
    """The counts were emptied and are being rebuilt from Postgres."""

    default_reason = Reason.STORE_UNAVAILABLE


class LimitReachedError(QuotaExceededError):
    """A limit leaves no place; nothing was charged. `standing` is that of every limit that is set."""

    def __init__(
        self, message: str, *, subject: str, retry_after: timedelta, standing: tuple[QuotaStanding, ...]
    ) -> None:
        super().__init__(message, subject=subject, retry_after=retry_after)
        self.standing = standing
