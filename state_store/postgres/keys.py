"""Tenants and API keys."""

from datetime import datetime

from service_kit.errors import AlreadyExistsError
from service_kit.ids import KeyId, TenantId
from state_store.errors import UnknownTenantError
from state_store.model import PriorityClass
from state_store.postgres import rows
from state_store.postgres.pool import PostgresPart
from state_store.tenants import ApiKey, Tenant

_FIND_KEY = """
SELECT k.key_id, k.prefix, k.key_hash, k.is_admin, k.created_at, k.expires_at, k.revoked_at,
    t.tenant_id, t.name, t.weight, t.max_class, t.disabled_at
FROM api_keys k JOIN tenants t ON t.tenant_id = k.tenant_id
"""
_FIND_KEY_BY_PREFIX = _FIND_KEY + "WHERE k.prefix = %(prefix)s"
_FIND_KEY_BY_ID = _FIND_KEY + "WHERE k.key_id = %(key_id)s"
_CREATE_TENANT = """
INSERT INTO tenants (tenant_id, name, weight, max_class) VALUES (%(tenant_id)s, %(name)s, %(weight)s, %(max_class)s)
ON CONFLICT (tenant_id) DO NOTHING RETURNING tenant_id
"""
_FIND_TENANT = "SELECT tenant_id, name, weight, max_class, disabled_at FROM tenants WHERE tenant_id = %(tenant_id)s"
_CREATE_KEY = """
INSERT INTO api_keys (key_id, tenant_id, prefix, key_hash, created_at, expires_at)
SELECT %(key_id)s, t.tenant_id, %(prefix)s, %(key_hash)s, now(), %(expires_at)s FROM tenants t
WHERE t.tenant_id = %(tenant_id)s
ON CONFLICT DO NOTHING RETURNING key_id
"""
_REVOKE_KEY = """
UPDATE api_keys SET revoked_at = coalesce(%(now)s::timestamptz, now())
WHERE key_id = %(key_id)s AND revoked_at IS NULL RETURNING key_id
"""


class PostgresKeys(PostgresPart):
    """KeyStore."""

    async def find_key(self, prefix: str) -> ApiKey | None:
        if "\x00" in prefix:
            return None
        found = await self._database.fetch(_FIND_KEY_BY_PREFIX, {"prefix": prefix})
        return rows.api_key(found[0]) if found else None

    async def create_tenant(
        self,
        tenant_id: TenantId,
        *,
        name: str,
        weight: float = 1.0,
        max_class: PriorityClass = PriorityClass.INTERACTIVE,
    ) -> Tenant:
        parameters = {"tenant_id": tenant_id, "name": name, "weight": weight, "max_class": max_class.value}
        await self._database.fetch(_CREATE_TENANT, parameters)
        found = await self._database.fetch(_FIND_TENANT, {"tenant_id": tenant_id})
        return rows.tenant(found[0])

    async def create_key(
        self, key_id: KeyId, tenant_id: TenantId, *, prefix: str, key_hash: bytes, expires_at: datetime | None = None
    ) -> ApiKey:
        if not await self._database.fetch(_FIND_TENANT, {"tenant_id": tenant_id}):
            raise UnknownTenantError(f"there is no tenant {tenant_id}")
        parameters = {
            "key_id": key_id,
            "tenant_id": tenant_id,
            "prefix": prefix,
            "key_hash": key_hash,
            "expires_at": expires_at,
        }
        await self._database.fetch(_CREATE_KEY, parameters)
        found = await self._database.fetch(_FIND_KEY_BY_ID, {"key_id": key_id})
        if not found:
            raise AlreadyExistsError("another key has this prefix")
        return rows.api_key(found[0])

    async def revoke_key(self, key_id: KeyId, *, now: datetime | None = None) -> bool:
        return bool(await self._database.fetch(_REVOKE_KEY, {"key_id": key_id, "now": now}))
