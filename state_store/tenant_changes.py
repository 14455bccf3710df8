"""What a change makes of a tenant or a key, and what is written down about it. Pure; both adapters decide with it."""

from collections.abc import Mapping
from dataclasses import fields, replace
from datetime import datetime, timedelta

from state_store.tenant_store import KeyChange, NewKey, NewTenant, TenantChange
from state_store.tenants import ApiKey, QuotaLimits, Tenant

LIMIT_NAMES = tuple(it.name for it in fields(QuotaLimits))


def is_over(key: ApiKey, now: datetime) -> bool:
    """Revoked or expired."""
    return key.revoked_at is not None or (key.expires_at is not None and key.expires_at <= now)


def made_tenant(new: NewTenant) -> Tenant:
    return Tenant(
        tenant_id=new.tenant_id,
        name=new.name,
        weight=new.weight,
        max_class=new.max_class,
        allowed_models=new.allowed_models,
        limits=new.limits,
    )


def made_key(new: NewKey, tenant: Tenant, now: datetime) -> ApiKey:
    return ApiKey(
        key_id=new.key_id,
        tenant=tenant,
        name=new.name,
        prefix=new.prefix,
        key_hash=new.key_hash,
        is_admin=new.is_admin,
        limits=new.limits,
        created_at=now,
        expires_at=new.expires_at,
        revoked_at=None,
    )


def changed_tenant(tenant: Tenant, change: TenantChange, now: datetime) -> Tenant:
    """Disabling a tenant that is disabled keeps the first time."""
    disabled_at = tenant.disabled_at
    if change.is_disabled is not None:
        disabled_at = (tenant.disabled_at or now) if change.is_disabled else None
    models = change.allowed_models if change.allowed_models is not None else tenant.allowed_models
    return replace(
        tenant,
        name=change.name if change.name is not None else tenant.name,
        weight=change.weight if change.weight is not None else tenant.weight,
        max_class=change.max_class if change.max_class is not None else tenant.max_class,
        allowed_models=None if change.allows_all_models else models,
        limits=_changed_limits(tenant.limits, change),
        disabled_at=disabled_at,
    )


def changed_key(key: ApiKey, change: KeyChange) -> ApiKey:
    return replace(
        key,
        name=change.name if change.name is not None else key.name,
        limits=_changed_limits(key.limits, change),
        expires_at=change.expires_at if change.expires_at is not None else key.expires_at,
    )


def replaced_key(key: ApiKey, now: datetime, overlap: timedelta) -> ApiKey:
    """The key that was rotated: it ends after the overlap, and never later than it would have."""
    end = now + overlap
    return replace(key, expires_at=end if key.expires_at is None else min(end, key.expires_at))


def tenant_details(tenant: Tenant) -> dict[str, str]:
    """Every fact of a tenant in words."""
    return {
        "name": tenant.name,
        "weight": f"{tenant.weight:g}",
        "max_class": tenant.max_class.value,
        "allowed_models": "all" if tenant.allowed_models is None else ",".join(tenant.allowed_models),
        **_limit_details(tenant.limits),
        "disabled": _words(is_true=tenant.disabled_at is not None),
    }


def key_details(key: ApiKey) -> dict[str, str]:
    """Every fact of a key in words; not its hash."""
    return {
        "tenant": key.tenant.tenant_id,
        "name": key.name,
        "prefix": key.prefix,
        "is_admin": _words(is_true=key.is_admin),
        **_limit_details(key.limits),
        "expires_at": key.expires_at.isoformat() if key.expires_at is not None else "never",
    }


def rotation_details(old: ApiKey, new: ApiKey, replaced: ApiKey) -> dict[str, str]:
    changes = difference(key_details(old), key_details(replaced))
    return {"tenant": old.tenant.tenant_id, "new_key_id": new.key_id, "new_prefix": new.prefix, **changes}


def difference(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """What changed to what; empty when nothing did, and then nothing is written."""
    return {name: f"{before[name]} -> {value}" for name, value in after.items() if before[name] != value}


def _changed_limits(limits: QuotaLimits, change: TenantChange | KeyChange) -> QuotaLimits:
    return replace(change.limits if change.limits is not None else limits, **change.named_limits)


def _limit_details(limits: QuotaLimits) -> dict[str, str]:
    values = {name: getattr(limits, name) for name in LIMIT_NAMES}
    return {f"limits.{name}": "unlimited" if value is None else str(value) for name, value in values.items()}


def _words(*, is_true: bool) -> str:
    return "yes" if is_true else "no"
