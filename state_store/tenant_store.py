"""Ports of the store for tenants, keys, the record of changes to them, and usage. Pure.

Every change is one transaction with its audit entry: both are written or none. `actor` is AuditEntry.actor. All methods raise
`StoreUnavailableError` when the store cannot be reached.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Protocol

from service_kit.ids import KeyId, TenantId
from state_store.model import PriorityClass
from state_store.tenants import UNLIMITED, ApiKey, AuditEntry, QuotaLimits, Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTenant:
    tenant_id: TenantId
    name: str
    weight: float = 1.0
    max_class: PriorityClass = PriorityClass.INTERACTIVE
    allowed_models: tuple[str, ...] | None = None
    limits: QuotaLimits = UNLIMITED


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantChange:
    """What is None stays. `allows_all_models` clears `allowed_models`; `limits` replaces all of them, `named_limits` those
    that it names: None takes one away."""

    name: str | None = None
    weight: float | None = None
    max_class: PriorityClass | None = None
    allowed_models: tuple[str, ...] | None = None
    allows_all_models: bool = False
    limits: QuotaLimits | None = None
    named_limits: Mapping[str, int | None] = field(default_factory=dict)
    is_disabled: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    key_id: KeyId
    tenant_id: TenantId
    name: str = ""
    prefix: str
    key_hash: bytes
    is_admin: bool = False
    limits: QuotaLimits = UNLIMITED
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChange:
    """What is None stays; limits as for tenants."""

    name: str | None = None
    limits: QuotaLimits | None = None
    named_limits: Mapping[str, int | None] = field(default_factory=dict)
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RotatedKey:
    """`replaced` is the old key with its new end."""

    key: ApiKey
    replaced: ApiKey


class KeyStore(Protocol):
    """What a gateway asks."""

    async def find_key(self, prefix: str) -> ApiKey | None:
        """The key with its tenant, in force or not."""


class WeightStore(Protocol):
    """What a scheduler asks."""

    async def weights(self, tenant_ids: Sequence[TenantId]) -> Mapping[TenantId, float]:
        """Of those that exist."""


class TenantStore(KeyStore, WeightStore, Protocol):
    """What administrators ask."""

    async def create_tenant(self, new: NewTenant, *, actor: str) -> Tenant:
        """Raises AlreadyExistsError (TENANT_EXISTS)."""

    async def update_tenant(
        self, tenant_id: TenantId, change: TenantChange, *, actor: str, now: datetime | None = None
    ) -> Tenant:
        """Raises UnknownTenantError."""

    async def get_tenant(self, tenant_id: TenantId) -> Tenant | None: ...

    async def list_tenants(self, *, after: TenantId | None, limit: int) -> list[Tenant]:
        """By id, above `after`."""

    async def create_key(self, new: NewKey, *, actor: str) -> ApiKey:
        """Raises UnknownTenantError, and AlreadyExistsError when another key has the id or prefix."""

    async def update_key(self, key_id: KeyId, change: KeyChange, *, actor: str) -> ApiKey:
        """Raises UnknownKeyError."""

    async def rotate_key(
        self,
        key_id: KeyId,
        *,
        new_key_id: KeyId,
        prefix: str,
        key_hash: bytes,
        overlap: timedelta,
        actor: str,
        now: datetime | None = None,
    ) -> RotatedKey:
        """A key with the tenant, name, rights, limits and expiry of `key_id`, which ends after `overlap` or when it would
        have ended before. Raises UnknownKeyError, also when that one is over."""

    async def revoke_key(self, key_id: KeyId, *, actor: str, now: datetime | None = None) -> ApiKey:
        """Idempotent: the first revocation stays, and only that one is written down. Raises UnknownKeyError."""

    async def list_keys(
        self,
        *,
        tenant_id: TenantId | None,
        include_over: bool,
        before: KeyId | None,
        limit: int,
        now: datetime | None = None,
    ) -> list[ApiKey]:
        """By (created_at, key_id), newest first, behind the key `before`."""

    async def list_audit(self, *, target: str | None, before: int | None, limit: int) -> list[AuditEntry]:
        """Newest first, with audit_id below `before`."""


class UsageDimension(StrEnum):
    """What usage is summed by."""

    TENANT = "tenant"
    KEY = "key"
    MODEL = "model"
    CLASS = "class"
    STATE = "state"
    DAY = "day"


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """Generations that ended in [since, until); each dimension at most once."""

    tenant_id: TenantId | None
    since: datetime
    until: datetime
    group_by: tuple[UsageDimension, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """`group` are the values of the dimensions, in the order asked for; a day is YYYY-MM-DD, UTC."""

    group: tuple[str, ...]
    generations: int
    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int


class UsageStore(Protocol):
    """Sums over the ledger."""

    async def usage(self, query: UsageQuery) -> list[UsageRow]:
        """By group; without dimensions one row, of zeros when there is nothing."""
