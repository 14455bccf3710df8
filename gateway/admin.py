"""The administrators' servicer: decode, call, encode. Errors are raised; the server's interceptor makes statuses of them."""

import uuid
from collections.abc import Callable
from datetime import datetime
from typing import Any, Protocol

from gateway.admin_codec import encode_audit_entry, encode_key, encode_tenant, encode_usage_row
from gateway.admin_page_token import decode_admin_token, encode_admin_token
from gateway.admin_validation import (
    parse_expiry,
    parse_key_change,
    parse_key_id,
    parse_limits,
    parse_new_tenant,
    parse_overlap,
    parse_target,
    parse_tenant_change,
    parse_tenant_filter,
    parse_usage_query,
)
from gateway.auth import Authenticator
from gateway.validation import parse_page_size
from inference.v1 import admin_pb2, admin_pb2_grpc
from service_kit.api_key import mint_api_key
from service_kit.errors import InvalidArgumentError, PermissionDeniedError
from service_kit.ids import KeyId, TenantId
from service_kit.logging import get_logger
from state_store.errors import UnknownTenantError
from state_store.tenant_rules import check_name, check_tenant_id
from state_store.tenant_store import NewKey, TenantStore, UsageStore

_MAX_USAGE_ROWS = 10_000
_MAX_AUDIT_ID = (1 << 63) - 1

_log = get_logger()


class AdminStore(TenantStore, UsageStore, Protocol):
    """What the administrators' servicer asks."""


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Stateless; every call proves an admin key first."""

    def __init__(self, authenticator: Authenticator, store: AdminStore, *, now: Callable[[], datetime]) -> None:
        self._authenticator = authenticator
        self._store = store
        self._now = now

    async def _authorize(self, context: Any) -> str:
        """Who calls, as an actor of the audit. Raises UnauthenticatedError and PermissionDeniedError."""
        key = await self._authenticator.authenticate_call(context)
        if not key.is_admin:
            raise PermissionDeniedError("this call needs an admin key")
        return f"key:{key.key_id}"

    async def CreateTenant(  # noqa: N802 - named by the proto
        self, request: admin_pb2.CreateTenantRequest, context: Any
    ) -> admin_pb2.CreateTenantResponse:
        actor = await self._authorize(context)
        tenant = await self._store.create_tenant(parse_new_tenant(request.tenant), actor=actor)
        _log.info("tenant_created", tenant_id=tenant.tenant_id, actor=actor)
        return admin_pb2.CreateTenantResponse(tenant=encode_tenant(tenant))

    async def UpdateTenant(  # noqa: N802
        self, request: admin_pb2.UpdateTenantRequest, context: Any
    ) -> admin_pb2.UpdateTenantResponse:
        actor = await self._authorize(context)
        tenant_id = check_tenant_id(request.tenant_id, "tenant_id")
        tenant = await self._store.update_tenant(tenant_id, parse_tenant_change(request), actor=actor)
        _log.info("tenant_updated", tenant_id=tenant_id, actor=actor)
        return admin_pb2.UpdateTenantResponse(tenant=encode_tenant(tenant))

    async def GetTenant(  # noqa: N802
        self, request: admin_pb2.GetTenantRequest, context: Any
    ) -> admin_pb2.GetTenantResponse:
        await self._authorize(context)
        tenant_id = check_tenant_id(request.tenant_id, "tenant_id")
        tenant = await self._store.get_tenant(tenant_id)
        if tenant is None:
            raise UnknownTenantError(f"there is no tenant {tenant_id}")
        return admin_pb2.GetTenantResponse(tenant=encode_tenant(tenant))

    async def ListTenants(  # noqa: N802
        self, request: admin_pb2.ListTenantsRequest, context: Any
    ) -> admin_pb2.ListTenantsResponse:
        await self._authorize(context)
        size = parse_page_size(request.page_size)
        after = decode_admin_token(request.page_token, ("tenants",))
        found = await self._store.list_tenants(after=TenantId(after) if after is not None else None, limit=size + 1)
        page = found[:size]
        return admin_pb2.ListTenantsResponse(
            tenants=[encode_tenant(tenant) for tenant in page],
            next_page_token=encode_admin_token(page[-1].tenant_id, ("tenants",)) if len(found) > size else "",
        )

    async def CreateKey(  # noqa: N802
        self, request: admin_pb2.CreateKeyRequest, context: Any
    ) -> admin_pb2.CreateKeyResponse:
        actor = await self._authorize(context)
        tenant_id = check_tenant_id(request.tenant_id, "tenant_id")
        name, limits = check_name(request.name, "name"), parse_limits(request.limits, "limits")
        expires_at = parse_expiry(request.expire_time, self._now()) if request.HasField("expire_time") else None
        secret, minted = mint_api_key()
        new = NewKey(
            key_id=_new_key_id(),
            tenant_id=tenant_id,
            name=name,
            prefix=minted.prefix,
            key_hash=minted.key_hash,
            is_admin=request.is_admin,
            limits=limits,
            expires_at=expires_at,
        )
        key = await self._store.create_key(new, actor=actor)
        _log.info("key_created", key_id=key.key_id, tenant_id=tenant_id, is_admin=key.is_admin, actor=actor)
        return admin_pb2.CreateKeyResponse(key=encode_key(key), secret=secret)

    async def UpdateKey(  # noqa: N802
        self, request: admin_pb2.UpdateKeyRequest, context: Any
    ) -> admin_pb2.UpdateKeyResponse:
        actor = await self._authorize(context)
        key_id = parse_key_id(request.key_id)
        key = await self._store.update_key(key_id, parse_key_change(request, self._now()), actor=actor)
        _log.info("key_updated", key_id=key_id, actor=actor)
        return admin_pb2.UpdateKeyResponse(key=encode_key(key))

    async def RotateKey(  # noqa: N802
        self, request: admin_pb2.RotateKeyRequest, context: Any
    ) -> admin_pb2.RotateKeyResponse:
        actor = await self._authorize(context)
        key_id, overlap = parse_key_id(request.key_id), parse_overlap(request)
        secret, minted = mint_api_key()
        rotated = await self._store.rotate_key(
            key_id,
            new_key_id=_new_key_id(),
            prefix=minted.prefix,
            key_hash=minted.key_hash,
            overlap=overlap,
            actor=actor,
        )
        _log.info("key_rotated", key_id=key_id, new_key_id=rotated.key.key_id, actor=actor)
        return admin_pb2.RotateKeyResponse(
            key=encode_key(rotated.key), secret=secret, replaced=encode_key(rotated.replaced)
        )

    async def RevokeKey(  # noqa: N802
        self, request: admin_pb2.RevokeKeyRequest, context: Any
    ) -> admin_pb2.RevokeKeyResponse:
        actor = await self._authorize(context)
        key = await self._store.revoke_key(parse_key_id(request.key_id), actor=actor)
        _log.info("key_revoked", key_id=key.key_id, actor=actor)
        return admin_pb2.RevokeKeyResponse(key=encode_key(key))

    async def ListKeys(  # noqa: N802
        self, request: admin_pb2.ListKeysRequest, context: Any
    ) -> admin_pb2.ListKeysResponse:
        await self._authorize(context)
        size = parse_page_size(request.page_size)
        filters = ("keys", request.tenant_id, str(request.include_over))
        before = decode_admin_token(request.page_token, filters)
        found = await self._store.list_keys(
            tenant_id=parse_tenant_filter(request.tenant_id),
            include_over=request.include_over,
            before=KeyId(before) if before is not None else None,
            limit=size + 1,
            now=self._now(),
        )
        page = found[:size]
        return admin_pb2.ListKeysResponse(
            keys=[encode_key(key) for key in page],
            next_page_token=encode_admin_token(page[-1].key_id, filters) if len(found) > size else "",
        )

    async def GetUsage(  # noqa: N802
        self, request: admin_pb2.GetUsageRequest, context: Any
    ) -> admin_pb2.GetUsageResponse:
        await self._authorize(context)
        rows = await self._store.usage(parse_usage_query(request, self._now()))
        if len(rows) > _MAX_USAGE_ROWS:
            raise InvalidArgumentError("group_by", f"makes more than {_MAX_USAGE_ROWS} rows; ask for less at once")
        return admin_pb2.GetUsageResponse(rows=[encode_usage_row(row) for row in rows])

    async def ListAudit(  # noqa: N802
        self, request: admin_pb2.ListAuditRequest, context: Any
    ) -> admin_pb2.ListAuditResponse:
        await self._authorize(context)
        size = parse_page_size(request.page_size)
        target, filters = parse_target(request.target), ("audit", request.target)
        before = _parse_audit_position(decode_admin_token(request.page_token, filters))
        found = await self._store.list_audit(target=target, before=before, limit=size + 1)
        page = found[:size]
        return admin_pb2.ListAuditResponse(
            entries=[encode_audit_entry(entry) for entry in page],
            next_page_token=encode_admin_token(str(page[-1].audit_id), filters) if len(found) > size else "",
        )


def _new_key_id() -> KeyId:
    return KeyId(str(uuid.uuid4()))


def _parse_audit_position(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(_MAX_AUDIT_ID)) and int(text) <= _MAX_AUDIT_ID):
        raise InvalidArgumentError("page_token", "is no page token")
    return int(text)
