"""Tenants and API keys in memory."""

from dataclasses import replace
from datetime import datetime

from service_kit.errors import AlreadyExistsError
from service_kit.ids import KeyId, TenantId
from state_store.errors import UnknownTenantError
from state_store.memory.data import MemoryPart
from state_store.model import PriorityClass
from state_store.tenants import ApiKey, Tenant


class MemoryKeys(MemoryPart):
    """KeyStore."""

    async def find_key(self, prefix: str) -> ApiKey | None:
        return next((key for key in self._data.keys.values() if key.prefix == prefix), None)

    async def create_tenant(
        self,
        tenant_id: TenantId,
        *,
        name: str,
        weight: float = 1.0,
        max_class: PriorityClass = PriorityClass.INTERACTIVE,
    ) -> Tenant:
        tenant = Tenant(tenant_id=tenant_id, name=name, weight=weight, max_class=max_class, disabled_at=None)
        return self._data.tenants.setdefault(tenant_id, tenant)

    async def create_key(
        self, key_id: KeyId, tenant_id: TenantId, *, prefix: str, key_hash: bytes, expires_at: datetime | None = None
    ) -> ApiKey:
        tenant = self._data.tenants.get(tenant_id)
        if tenant is None:
            raise UnknownTenantError(f"there is no tenant {tenant_id}")
        if key_id in self._data.keys:
            return self._data.keys[key_id]
        if any(key.prefix == prefix for key in self._data.keys.values()):
            raise AlreadyExistsError("another key has this prefix")
        key = ApiKey(
            key_id=key_id,
            tenant=tenant,
            prefix=prefix,
            key_hash=key_hash,
            is_admin=False,
            created_at=self._clock(),
            expires_at=expires_at,
            revoked_at=None,
        )
        self._data.keys[key_id] = key
        return key

    async def revoke_key(self, key_id: KeyId, *, now: datetime | None = None) -> bool:
        key = self._data.keys.get(key_id)
        if key is None or key.revoked_at is not None:
            return False
        self._data.keys[key_id] = replace(key, revoked_at=self._at(now))
        return True
