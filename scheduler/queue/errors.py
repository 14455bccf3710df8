"""Errors of the admission queue. Pure."""

from service_kit.errors import Reason, UnavailableError


class QueueUnavailableError(UnavailableError):
    """The queue's server cannot be reached. It is not known whether the call took effect; repeating is safe."""

    default_reason = Reason.STORE_UNAVAILABLE


class QueueNotReadyError(UnavailableError):
    """The queue was emptied and is being rebuilt from Postgres."""

    default_reason = Reason.STORE_UNAVAILABLE
