"""Tenants, their API keys and limits, and what is written down about changes to them. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from service_kit.ids import KeyId, TenantId
from state_store.model import PriorityClass


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaLimits:
    """What a tenant, or one key of it, may use at most; None is unlimited. A minute is any 60 s; day and month are those
    of UTC. Tokens are prompt and output; a live generation counts with its prompt and its max_output_tokens."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    """Generations that have not ended: queued and running ones."""
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None


UNLIMITED = QuotaLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Who is served and accounted."""

    tenant_id: TenantId
    name: str
    weight: float
    """Share of the tokens beside other tenants, above 0; 1 is usual."""
    max_class: PriorityClass
    """Highest class its requests may ask for."""
    allowed_models: tuple[str, ...] | None = None
    """Names of the models it may use; None is all."""
    limits: QuotaLimits = UNLIMITED
    disabled_at: datetime | None = None

    def may_use(self, model: str) -> bool:
        return self.allowed_models is None or model in self.allowed_models


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key as stored: recognised by prefix, proven by hash."""

    key_id: KeyId
    tenant: Tenant
    name: str = ""
    """For people: what the key is for."""
    prefix: str
    key_hash: bytes = field(repr=False)
    is_admin: bool
    limits: QuotaLimits = UNLIMITED
    """Within those of its tenant."""
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One change by an administrator, written in the transaction that made it. Never holds a secret."""

    audit_id: int
    at: datetime
    actor: str
    """"key:<key_id>" for a call with an admin key, "operator:<name>" for a command on the database."""
    action: str
    """Constant word: "tenant.create", "tenant.update", "key.create", "key.update", "key.rotate", "key.revoke"."""
    target: str
    """Tenant or key id."""
    details: Mapping[str, str]
