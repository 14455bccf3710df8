"""Tenants, their weights, and the record of administrators' changes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from service_kit.errors import AlreadyExistsError, Reason
from service_kit.ids import TenantId
from state_store.errors import UnknownTenantError
from state_store.postgres import tenant_rows
from state_store.postgres.pool import Parameters, PostgresPart, Transaction
from state_store.tenant_changes import changed_tenant, difference, made_tenant, tenant_details
from state_store.tenant_store import NewTenant, TenantChange
from state_store.tenants import AuditEntry, Tenant

_COLUMNS = """
    t.tenant_id, t.name AS tenant_name, t.weight, t.max_class, t.allowed_models, t.disabled_at,
    t.requests_per_minute AS tenant_requests_per_minute, t.tokens_per_minute AS tenant_tokens_per_minute,
    t.max_concurrent AS tenant_max_concurrent, t.tokens_per_day AS tenant_tokens_per_day,
    t.tokens_per_month AS tenant_tokens_per_month
"""


def with_tenant(statement: str) -> str:
    """The statement with the columns of tenants `t` in place of `:tenant`."""
    return statement.replace(":tenant", _COLUMNS)


GET_TENANT = with_tenant("SELECT :tenant FROM tenants t WHERE t.tenant_id = %(tenant_id)s")
LIST_TENANTS = with_tenant(
    "SELECT :tenant FROM tenants t WHERE t.tenant_id > %(after)s ORDER BY t.tenant_id LIMIT %(limit)s"
)
WEIGHTS = "SELECT tenant_id, weight FROM tenants WHERE tenant_id = ANY(%(tenant_ids)s::text[])"
LIST_AUDIT = """
SELECT audit_id, at, actor, action, target, details FROM admin_audit
WHERE (%(before)s::bigint IS NULL OR audit_id < %(before)s) ORDER BY audit_id DESC LIMIT %(limit)s
"""
LIST_AUDIT_OF_TARGET = """
SELECT audit_id, at, actor, action, target, details FROM admin_audit
WHERE target = %(target)s AND (%(before)s::bigint IS NULL OR audit_id < %(before)s)
ORDER BY audit_id DESC LIMIT %(limit)s
"""
_LOCK_TENANT = with_tenant(
    "SELECT :tenant, coalesce(%(now)s::timestamptz, now()) AS now FROM tenants t WHERE t.tenant_id = %(tenant_id)s FOR NO KEY UPDATE"
)
_CREATE_TENANT = """
INSERT INTO tenants (tenant_id, name, weight, max_class, allowed_models, requests_per_minute, tokens_per_minute,
    max_concurrent, tokens_per_day, tokens_per_month)
VALUES (%(tenant_id)s, %(name)s, %(weight)s, %(max_class)s, %(allowed_models)s::text[], %(requests_per_minute)s,
    %(tokens_per_minute)s, %(max_concurrent)s, %(tokens_per_day)s, %(tokens_per_month)s)
ON CONFLICT (tenant_id) DO NOTHING RETURNING now() AS now
"""
_UPDATE_TENANT = """
UPDATE tenants SET name = %(name)s, weight = %(weight)s, max_class = %(max_class)s,
    allowed_models = %(allowed_models)s::text[], disabled_at = %(disabled_at)s,
    requests_per_minute = %(requests_per_minute)s, tokens_per_minute = %(tokens_per_minute)s,
    max_concurrent = %(max_concurrent)s, tokens_per_day = %(tokens_per_day)s, tokens_per_month = %(tokens_per_month)s
WHERE tenant_id = %(tenant_id)s
"""
_INSERT_AUDIT = """
INSERT INTO admin_audit (at, actor, action, target, details)
VALUES (%(at)s, %(actor)s, %(action)s, %(target)s, %(details)s::jsonb)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is to be written down, in the transaction that does it."""

    at: datetime
    actor: str
    action: str
    target: str
    details: Mapping[str, str]


async def write_down(transaction: Transaction, change: Change) -> None:
    parameters = {
        "at": change.at,
        "actor": change.actor,
        "action": change.action,
        "target": change.target,
        "details": json.dumps(dict(change.details)),
    }
    await transaction.send(_INSERT_AUDIT, parameters)


class PostgresTenants(PostgresPart):
    """The part of TenantStore about tenants and the audit, and WeightStore."""

    async def create_tenant(self, new: NewTenant, *, actor: str) -> Tenant:
        tenant = made_tenant(new)

        async def work(transaction: Transaction) -> Tenant:
            found = await transaction.fetch(_CREATE_TENANT, _parameters(tenant))
            if not found:
                raise AlreadyExistsError(f"there is a tenant {new.tenant_id} already", reason=Reason.TENANT_EXISTS)
            change = Change(
                at=found[0]["now"],
                actor=actor,
                action="tenant.create",
                target=tenant.tenant_id,
                details=tenant_details(tenant),
            )
            await write_down(transaction, change)
            return tenant

        return await self._database.transact(work)

    async def update_tenant(
        self, tenant_id: TenantId, change: TenantChange, *, actor: str, now: datetime | None = None
    ) -> Tenant:
        async def work(transaction: Transaction) -> Tenant:
            found = await transaction.fetch(_LOCK_TENANT, {"tenant_id": tenant_id, "now": now})
            if not found:
                raise UnknownTenantError(f"there is no tenant {tenant_id}")
            before, at = tenant_rows.tenant(found[0]), found[0]["now"]
            after = changed_tenant(before, change, at)
            details = difference(tenant_details(before), tenant_details(after))
            if details:
                await transaction.send(_UPDATE_TENANT, _parameters(after))
                written = Change(at=at, actor=actor, action="tenant.update", target=tenant_id, details=details)
                await write_down(transaction, written)
            return after

        return await self._database.transact(work)

    async def get_tenant(self, tenant_id: TenantId) -> Tenant | None:
        found = await self._database.fetch(GET_TENANT, {"tenant_id": tenant_id})
        return tenant_rows.tenant(found[0]) if found else None

    async def list_tenants(self, *, after: TenantId | None, limit: int) -> list[Tenant]:
        found = await self._database.fetch(LIST_TENANTS, {"after": after or "", "limit": limit})
        return [tenant_rows.tenant(row) for row in found]

    async def weights(self, tenant_ids: Sequence[TenantId]) -> Mapping[TenantId, float]:
        found = await self._database.fetch(WEIGHTS, {"tenant_ids": list(tenant_ids)})
        return {TenantId(row["tenant_id"]): row["weight"] for row in found}

    async def list_audit(self, *, target: str | None, before: int | None, limit: int) -> list[AuditEntry]:
        statement = LIST_AUDIT if target is None else LIST_AUDIT_OF_TARGET
        parameters = {"target": target, "before": before, "limit": limit}
        return [tenant_rows.audit_entry(row) for row in await self._database.fetch(statement, parameters)]


def _parameters(tenant: Tenant) -> Parameters:
    return {
        "tenant_id": tenant.tenant_id,
        "name": tenant.name,
        "weight": tenant.weight,
        "max_class": tenant.max_class.value,
        "allowed_models": list(tenant.allowed_models) if tenant.allowed_models is not None else None,
        "disabled_at": tenant.disabled_at,
        **tenant_rows.limit_parameters(tenant.limits),
    }
