"""What tenants and keys may look like. Pure; the gateway checks fields with it, the command line options.

Every function takes the name of the field that the error shall name, and raises InvalidArgumentError.
"""

import re
from collections.abc import Sequence
from datetime import datetime, timedelta

from service_kit.errors import InvalidArgumentError
from service_kit.ids import KeyId, TenantId
from state_store.tenant_changes import LIMIT_NAMES
from state_store.tenants import QuotaLimits

MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
MAX_LIMIT = 10**15
"""Far above any use, and exact in every counter: Redis counts in doubles."""
MAX_NAME_LENGTH = 100
MAX_MODELS = 1000
MAX_OVERLAP = timedelta(days=90)
DEFAULT_OVERLAP = timedelta(hours=24)
_MAX_MODEL_LENGTH = 200
_TENANT_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}\Z")
_KEY_ID = re.compile(r"[A-Za-z0-9._-]{1,100}\Z")


def check_tenant_id(text: str, field: str) -> TenantId:
    if not _TENANT_ID.match(text):
        raise InvalidArgumentError(field, "must be 1 to 63 of a-z 0-9 . _ -, starting with a letter or digit")
    return TenantId(text)


def check_key_id(text: str, field: str) -> KeyId:
    if not _KEY_ID.match(text):
        raise InvalidArgumentError(field, "is no id of a key")
    return KeyId(text)


def check_name(text: str, field: str) -> str:
    if len(text) > MAX_NAME_LENGTH or not text.isprintable():
        raise InvalidArgumentError(field, f"must be at most {MAX_NAME_LENGTH} printable characters")
    return text


def check_weight(value: float, field: str) -> float:
    if not MIN_WEIGHT <= value <= MAX_WEIGHT:  # false for a NaN too
        raise InvalidArgumentError(field, f"must be from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")
    return value


def check_limits(limits: QuotaLimits, field: str) -> QuotaLimits:
    for name in LIMIT_NAMES:
        value = getattr(limits, name)
        if value is not None and not 1 <= value <= MAX_LIMIT:
            raise InvalidArgumentError(f"{field}.{name}", f"must be from 1 to {MAX_LIMIT}, or unset")
    return limits


def check_models(names: Sequence[str], field: str) -> tuple[str, ...]:
    if len(names) > MAX_MODELS or len(set(names)) != len(names):
        raise InvalidArgumentError(field, f"must be at most {MAX_MODELS} names, each once")
    for number, name in enumerate(names):
        if not 1 <= len(name) <= _MAX_MODEL_LENGTH or not name.isprintable():
            raise InvalidArgumentError(f"{field}[{number}]", "is no name of a model")
    return tuple(names)


def check_expiry(expires_at: datetime, now: datetime, field: str) -> datetime:
    if expires_at <= now:
        raise InvalidArgumentError(field, "must be in the future")
    return expires_at


def check_overlap(overlap: timedelta, field: str) -> timedelta:
    if not timedelta(0) <= overlap <= MAX_OVERLAP:
        raise InvalidArgumentError(field, f"must be from 0 to {MAX_OVERLAP.days} days")
    return overlap
