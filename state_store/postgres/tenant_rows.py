"""Rows of tenants, keys and the audit table, to and from values."""

from collections.abc import Mapping
from typing import Any

from state_store.model import PriorityClass
from state_store.tenant_changes import LIMIT_NAMES
from state_store.tenants import ApiKey, AuditEntry, QuotaLimits, Tenant

Row = Mapping[str, Any]


def tenant(row: Row) -> Tenant:
    return Tenant(
        tenant_id=row["tenant_id"],
        name=row["tenant_name"],
        weight=row["weight"],
        max_class=PriorityClass(row["max_class"]),
        allowed_models=tuple(row["allowed_models"]) if row["allowed_models"] is not None else None,
        limits=_limits(row, "tenant_"),
        disabled_at=row["disabled_at"],
    )


def api_key(row: Row) -> ApiKey:
    """From a join of api_keys and tenants."""
    return ApiKey(
        key_id=row["key_id"],
        tenant=tenant(row),
        name=row["name"],
        prefix=row["prefix"],
        key_hash=row["key_hash"],
        is_admin=row["is_admin"],
        limits=_limits(row, ""),
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
    )


def audit_entry(row: Row) -> AuditEntry:
    return AuditEntry(
        audit_id=row["audit_id"],
        at=row["at"],
        actor=row["actor"],
        action=row["action"],
        target=row["target"],
        details=row["details"],
    )


def limit_parameters(limits: QuotaLimits) -> dict[str, int | None]:
    return {name: getattr(limits, name) for name in LIMIT_NAMES}


def _limits(row: Row, prefix: str) -> QuotaLimits:
    return QuotaLimits(**{name: row[prefix + name] for name in LIMIT_NAMES})
