"""Administrators' requests, field by field, before anything is changed. Pure but for the protos it reads.

Errors name the field by its path in the proto.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from inference.v1 import admin_pb2, types_pb2
from service_kit.errors import InvalidArgumentError
from service_kit.ids import KeyId, TenantId
from state_store.model import PriorityClass
from state_store.tenant_rules import (
    DEFAULT_OVERLAP,
    check_expiry,
    check_key_id,
    check_limits,
    check_models,
    check_name,
    check_overlap,
    check_tenant_id,
    check_weight,
)
from state_store.tenant_store import KeyChange, NewTenant, TenantChange, UsageDimension, UsageQuery
from state_store.tenants import QuotaLimits

USAGE_SPAN = timedelta(days=30)
"""Back from now, when nothing is said."""
_CLASS_PREFIX = "PRIORITY_CLASS_"
_DIMENSION_PREFIX = "USAGE_DIMENSION_"
_MAX_TARGET_LENGTH = 100


def parse_new_tenant(message: admin_pb2.Tenant) -> NewTenant:
    if message.HasField("disabled_time"):
        raise InvalidArgumentError("tenant.disabled_time", "must be unset: disable the tenant when it is there")
    tenant_id = check_tenant_id(message.tenant_id, "tenant.tenant_id")
    # Proto3 does not tell 0 from unset here, and no tenant has the weight 0.
    weight = check_weight(message.weight, "tenant.weight") if message.weight != 0 else 1.0
    return NewTenant(
        tenant_id=tenant_id,
        name=check_name(message.name, "tenant.name") or str(tenant_id),
        weight=weight,
        max_class=_parse_class(message.max_class, "tenant.max_class") or PriorityClass.INTERACTIVE,
        allowed_models=_parse_models(message.allowed_models, "tenant.allowed_models")
        if message.HasField("allowed_models")
        else None,
        limits=parse_limits(message.limits, "tenant.limits"),
    )


def parse_tenant_change(request: admin_pb2.UpdateTenantRequest) -> TenantChange:
    has_models = request.HasField("allowed_models")
    if has_models and request.allow_all_models:
        raise InvalidArgumentError("allow_all_models", "contradicts allowed_models")
    return TenantChange(
        name=check_name(request.name, "name") if request.HasField("name") else None,
        weight=check_weight(request.weight, "weight") if request.HasField("weight") else None,
        max_class=_parse_class(request.max_class, "max_class"),
        allowed_models=_parse_models(request.allowed_models, "allowed_models") if has_models else None,
        allows_all_models=request.allow_all_models,
        limits=parse_limits(request.limits, "limits") if request.HasField("limits") else None,
        is_disabled=request.disabled if request.HasField("disabled") else None,
    )


def parse_key_change(request: admin_pb2.UpdateKeyRequest, now: datetime) -> KeyChange:
    return KeyChange(
        name=check_name(request.name, "name") if request.HasField("name") else None,
        limits=parse_limits(request.limits, "limits") if request.HasField("limits") else None,
        expires_at=parse_expiry(request.expire_time, now) if request.HasField("expire_time") else None,
    )


def parse_limits(message: admin_pb2.QuotaLimits, field: str) -> QuotaLimits:
    values = {field_set.name: value for field_set, value in message.ListFields()}  # those that are set, also to 0
    return check_limits(QuotaLimits(**values), field)


def parse_expiry(message: Timestamp, now: datetime) -> datetime:
    return check_expiry(_parse_time(message, "expire_time"), now, "expire_time")


def parse_overlap(request: admin_pb2.RotateKeyRequest) -> timedelta:
    if not request.HasField("overlap"):
        return DEFAULT_OVERLAP
    return check_overlap(_parse_duration(request.overlap, "overlap"), "overlap")


def parse_tenant_filter(text: str) -> TenantId | None:
    return check_tenant_id(text, "tenant_id") if text else None


def parse_key_id(text: str) -> KeyId:
    return check_key_id(text, "key_id")


def parse_target(text: str) -> str | None:
    if len(text) > _MAX_TARGET_LENGTH or not text.isprintable():
        raise InvalidArgumentError("target", "is no id of a tenant or key")
    return text or None


def parse_usage_query(request: admin_pb2.GetUsageRequest, now: datetime) -> UsageQuery:
    until = _parse_time(request.until_time, "until_time") if request.HasField("until_time") else now
    since = _parse_time(request.since_time, "since_time") if request.HasField("since_time") else now - USAGE_SPAN
    if since >= until:
        raise InvalidArgumentError("since_time", "must be before until_time")
    return UsageQuery(
        tenant_id=parse_tenant_filter(request.tenant_id),
        since=since,
        until=until,
        group_by=_parse_dimensions(request.group_by),
    )


def _parse_dimensions(values: Sequence[int]) -> tuple[UsageDimension, ...]:
    if len(set(values)) != len(values):
        raise InvalidArgumentError("group_by", "names something twice")
    return tuple(_parse_dimension(value, number) for number, value in enumerate(values))


def _parse_dimension(value: int, number: int) -> UsageDimension:
    for dimension in UsageDimension:
        if admin_pb2.UsageDimension.Value(f"{_DIMENSION_PREFIX}{dimension.name}") == value:
            return dimension
    raise InvalidArgumentError(f"group_by[{number}]", "is no dimension of usage")


def _parse_class(value: int, field: str) -> PriorityClass | None:
    if value == types_pb2.PRIORITY_CLASS_UNSPECIFIED:
        return None
    for priority in PriorityClass:
        if types_pb2.PriorityClass.Value(f"{_CLASS_PREFIX}{priority.name}") == value:
            return priority
    raise InvalidArgumentError(field, "is no class")


def _parse_models(message: admin_pb2.AllowedModels, field: str) -> tuple[str, ...]:
    return check_models(message.names, f"{field}.names")


def _parse_time(message: Timestamp, field: str) -> datetime:
    try:
        return message.ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise InvalidArgumentError(field, "is no time") from None


def _parse_duration(message: Duration, field: str) -> timedelta:
    try:
        return message.ToTimedelta()
    except (ValueError, OverflowError):
        raise InvalidArgumentError(field, "is no duration") from None
