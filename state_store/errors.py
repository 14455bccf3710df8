"""Errors of the stores. Pure. Results that a caller must branch on are values (see ports.py), not errors."""

from service_kit.errors import NotFoundError, Reason, UnavailableError


class StoreUnavailableError(UnavailableError):
    """Postgres cannot be reached or answers too late. It is not known whether the call took effect; repeating is safe."""

    default_reason = Reason.STORE_UNAVAILABLE


class LogUnavailableError(UnavailableError):
    """The delta log's server cannot be reached. It is not known whether the call took effect; repeating is safe."""

    default_reason = Reason.STORE_UNAVAILABLE


class UnknownTenantError(NotFoundError):
    """There is no such tenant."""

    default_reason = Reason.TENANT_NOT_FOUND


class UnknownKeyError(NotFoundError):
    """There is no such key, or it is over and the call needs one that is in force."""

    default_reason = Reason.KEY_NOT_FOUND
