"""Tenants and the record of administrators' changes in memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from service_kit.errors import AlreadyExistsError, Reason
from service_kit.ids import TenantId
from state_store.errors import UnknownTenantError
from state_store.memory.data import MemoryPart
from state_store.tenant_changes import changed_tenant, difference, made_tenant, tenant_details
from state_store.tenant_store import NewTenant, TenantChange
from state_store.tenants import AuditEntry, Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is to be written down."""

    actor: str
    action: str
    target: str
    details: Mapping[str, str]


class MemoryAudit(MemoryPart):
    """The audit part of TenantStore; the others write through `_record`."""

    def _record(self, change: Change, at: datetime) -> None:
        entry = AuditEntry(
            audit_id=len(self._data.audit) + 1,
            at=at,
            actor=change.actor,
            action=change.action,
            target=change.target,
            details=dict(change.details),
        )
        self._data.audit.append(entry)

    async def list_audit(self, *, target: str | None, before: int | None, limit: int) -> list[AuditEntry]:
        found = [
            entry
            for entry in reversed(self._data.audit)
            if target in (None, entry.target) and (before is None or entry.audit_id < before)
        ]
        return found[:limit]


class MemoryTenants(MemoryAudit):
    """The tenants' part of TenantStore, and WeightStore."""

    async def create_tenant(self, new: NewTenant, *, actor: str) -> Tenant:
        if new.tenant_id in self._data.tenants:
            raise AlreadyExistsError(f"there is a tenant {new.tenant_id} already", reason=Reason.TENANT_EXISTS)
        tenant = made_tenant(new)
        self._data.tenants[new.tenant_id] = tenant
        change = Change(actor=actor, action="tenant.create", target=tenant.tenant_id, details=tenant_details(tenant))
        self._record(change, self._clock())
        return tenant

    async def update_tenant(
        self, tenant_id: TenantId, change: TenantChange, *, actor: str, now: datetime | None = None
    ) -> Tenant:
        before = self._tenant(tenant_id)
        at = self._at(now)
        after = changed_tenant(before, change, at)
        details = difference(tenant_details(before), tenant_details(after))
        if details:
            self._data.tenants[tenant_id] = after
            self._record(Change(actor=actor, action="tenant.update", target=tenant_id, details=details), at)
        return after

    async def get_tenant(self, tenant_id: TenantId) -> Tenant | None:
        return self._data.tenants.get(tenant_id)

    async def list_tenants(self, *, after: TenantId | None, limit: int) -> list[Tenant]:
        ids = sorted(tenant_id for tenant_id in self._data.tenants if after is None or tenant_id > after)
        return [self._data.tenants[tenant_id] for tenant_id in ids[:limit]]

    async def weights(self, tenant_ids: Sequence[TenantId]) -> Mapping[TenantId, float]:
        tenants = self._data.tenants
        return {tenant_id: tenants[tenant_id].weight for tenant_id in tenant_ids if tenant_id in tenants}

    def _tenant(self, tenant_id: TenantId) -> Tenant:
        tenant = self._data.tenants.get(tenant_id)
        if tenant is None:
            raise UnknownTenantError(f"there is no tenant {tenant_id}")
        return tenant
