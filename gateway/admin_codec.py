"""Tenants, keys, usage and audit entries as messages."""

from datetime import datetime

from google.protobuf.timestamp_pb2 import Timestamp

from inference.v1 import admin_pb2, types_pb2
from state_store.tenant_changes import LIMIT_NAMES
from state_store.tenant_store import UsageRow
from state_store.tenants import ApiKey, AuditEntry, QuotaLimits, Tenant


def encode_limits(limits: QuotaLimits) -> admin_pb2.QuotaLimits:
    values = {name: getattr(limits, name) for name in LIMIT_NAMES}
    return admin_pb2.QuotaLimits(**{name: value for name, value in values.items() if value is not None})


def encode_tenant(tenant: Tenant) -> admin_pb2.Tenant:
    models = tenant.allowed_models
    return admin_pb2.Tenant(
        tenant_id=tenant.tenant_id,
        name=tenant.name,
        weight=tenant.weight,
        max_class=types_pb2.PriorityClass.Value(f"PRIORITY_CLASS_{tenant.max_class.value}"),
        allowed_models=admin_pb2.AllowedModels(names=models) if models is not None else None,
        limits=encode_limits(tenant.limits),
        disabled_time=_timestamp(tenant.disabled_at),
    )


def encode_key(key: ApiKey) -> admin_pb2.ApiKey:
    """Without its hash."""
    return admin_pb2.ApiKey(
        key_id=key.key_id,
        tenant_id=key.tenant.tenant_id,
        name=key.name,
        prefix=key.prefix,
        is_admin=key.is_admin,
        limits=encode_limits(key.limits),
        create_time=_timestamp(key.created_at),
        expire_time=_timestamp(key.expires_at),
        revoke_time=_timestamp(key.revoked_at),
    )


def encode_usage_row(row: UsageRow) -> admin_pb2.UsageRow:
    return admin_pb2.UsageRow(
        group=row.group,
        generations=row.generations,
        prompt_tokens=row.prompt_tokens,
        cached_prompt_tokens=row.cached_prompt_tokens,
        output_tokens=row.output_tokens,
    )


def encode_audit_entry(entry: AuditEntry) -> admin_pb2.AuditEntry:
    return admin_pb2.AuditEntry(
        time=_timestamp(entry.at), actor=entry.actor, action=entry.action, target=entry.target, details=entry.details
    )


def _timestamp(moment: datetime | None) -> Timestamp | None:
    if moment is None:
        return None
    message = Timestamp()
    message.FromDatetime(moment)
    return message
