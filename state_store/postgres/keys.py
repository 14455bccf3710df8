"""API keys. A row stays after its key is over: the ledger refers to it."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from service_kit.errors import AlreadyExistsError, Reason
from service_kit.ids import KeyId, TenantId
from state_store.errors import UnknownKeyError, UnknownTenantError
from state_store.postgres import tenant_rows
from state_store.postgres.pool import Parameters, PostgresPart, Transaction
from state_store.postgres.tenants import Change, with_tenant, write_down
from state_store.tenant_changes import (
    changed_key,
    difference,
    is_over,
    key_details,
    made_key,
    replaced_key,
    rotation_details,
)
from state_store.tenant_store import KeyChange, NewKey, RotatedKey
from state_store.tenants import ApiKey

_KEY = with_tenant("""
    k.key_id, k.name, k.prefix, k.key_hash, k.is_admin, k.created_at, k.expires_at, k.revoked_at,
    k.requests_per_minute, k.tokens_per_minute, k.max_concurrent, k.tokens_per_day, k.tokens_per_month, :tenant
""")


def _filled(statement: str) -> str:
    return statement.replace(":key", _KEY).replace(":now", "coalesce(%(now)s::timestamptz, now())")


FIND_KEY = _filled("""
SELECT :key FROM api_keys k JOIN tenants t ON t.tenant_id = k.tenant_id WHERE k.prefix = %(prefix)s
""")
_LIST_KEYS = """
SELECT :key FROM api_keys k JOIN tenants t ON t.tenant_id = k.tenant_id
WHERE :only
    (%(include_over)s OR (k.revoked_at IS NULL AND (k.expires_at IS NULL OR k.expires_at > :now)))
    AND (%(before)s::text IS NULL
        OR (k.created_at, k.key_id) < (SELECT b.created_at, b.key_id FROM api_keys b WHERE b.key_id = %(before)s))
ORDER BY k.created_at DESC, k.key_id DESC LIMIT %(limit)s
"""
LIST_KEYS = _filled(_LIST_KEYS.replace(":only", ""))
LIST_KEYS_OF_TENANT = _filled(_LIST_KEYS.replace(":only", "k.tenant_id = %(tenant_id)s AND"))
_LOCK_KEY = _filled("""
SELECT :key, :now AS now FROM api_keys k JOIN tenants t ON t.tenant_id = k.tenant_id
WHERE k.key_id = %(key_id)s FOR NO KEY UPDATE OF k
""")
_TENANT_OF_NEW_KEY = with_tenant("""
SELECT :tenant, now() AS now FROM tenants t WHERE t.tenant_id = %(tenant_id)s FOR KEY SHARE
""")
_INSERT_KEY = """
INSERT INTO api_keys (key_id, tenant_id, name, prefix, key_hash, is_admin, created_at, expires_at, requests_per_minute,
    tokens_per_minute, max_concurrent, tokens_per_day, tokens_per_month)
VALUES (%(key_id)s, %(tenant_id)s, %(name)s, %(prefix)s, %(key_hash)s, %(is_admin)s, %(created_at)s, %(expires_at)s,
    %(requests_per_minute)s, %(tokens_per_minute)s, %(max_concurrent)s, %(tokens_per_day)s, %(tokens_per_month)s)
ON CONFLICT DO NOTHING RETURNING key_id
"""
_UPDATE_KEY = """
UPDATE api_keys SET name = %(name)s, expires_at = %(expires_at)s, revoked_at = %(revoked_at)s,
    requests_per_minute = %(requests_per_minute)s, tokens_per_minute = %(tokens_per_minute)s,
    max_concurrent = %(max_concurrent)s, tokens_per_day = %(tokens_per_day)s, tokens_per_month = %(tokens_per_month)s
WHERE key_id = %(key_id)s
"""


class PostgresKeys(PostgresPart):
    """The part of TenantStore about keys."""

    async def find_key(self, prefix: str) -> ApiKey | None:
        if "\x00" in prefix:
            return None
        found = await self._database.fetch(FIND_KEY, {"prefix": prefix})
        return tenant_rows.api_key(found[0]) if found else None

    async def create_key(self, new: NewKey, *, actor: str) -> ApiKey:
        async def work(transaction: Transaction) -> ApiKey:
            found = await transaction.fetch(_TENANT_OF_NEW_KEY, {"tenant_id": new.tenant_id})
            if not found:
                raise UnknownTenantError(f"there is no tenant {new.tenant_id}")
            at = found[0]["now"]
            key = made_key(new, tenant_rows.tenant(found[0]), at)
            await _insert(transaction, key)
            change = Change(at=at, actor=actor, action="key.create", target=key.key_id, details=key_details(key))
            await write_down(transaction, change)
            return key

        return await self._database.transact(work)

    async def update_key(self, key_id: KeyId, change: KeyChange, *, actor: str) -> ApiKey:
        async def work(transaction: Transaction) -> ApiKey:
            before, at = await _lock(transaction, key_id, None)
            after = changed_key(before, change)
            details = difference(key_details(before), key_details(after))
            if details:
                await transaction.send(_UPDATE_KEY, _parameters(after))
                written = Change(at=at, actor=actor, action="key.update", target=key_id, details=details)
                await write_down(transaction, written)
            return after

        return await self._database.transact(work)

    async def rotate_key(
        self,
        key_id: KeyId,
        *,
        new_key_id: KeyId,
        prefix: str,
        key_hash: bytes,
        overlap: timedelta,
        actor: str,
        now: datetime | None = None,
    ) -> RotatedKey:
        async def work(transaction: Transaction) -> RotatedKey:
            old, at = await _lock(transaction, key_id, now)
            if is_over(old, at):
                raise UnknownKeyError(f"the key {key_id} is over")
            new = replace(old, key_id=new_key_id, prefix=prefix, key_hash=key_hash, created_at=at)
            replaced = replaced_key(old, at, overlap)
            await _insert(transaction, new)
            await transaction.send(_UPDATE_KEY, _parameters(replaced))
            details = rotation_details(old, new, replaced)
            change = Change(at=at, actor=actor, action="key.rotate", target=key_id, details=details)
            await write_down(transaction, change)
            return RotatedKey(key=new, replaced=replaced)

        return await self._database.transact(work)

    async def revoke_key(self, key_id: KeyId, *, actor: str, now: datetime | None = None) -> ApiKey:
        async def work(transaction: Transaction) -> ApiKey:
            key, at = await _lock(transaction, key_id, now)
            if key.revoked_at is not None:
                return key
            revoked = replace(key, revoked_at=at)
            await transaction.send(_UPDATE_KEY, _parameters(revoked))
            details = {"tenant": key.tenant.tenant_id, "prefix": key.prefix}
            change = Change(at=at, actor=actor, action="key.revoke", target=key_id, details=details)
            await write_down(transaction, change)
            return revoked

        return await self._database.transact(work)

    async def list_keys(
        self,
        *,
        tenant_id: TenantId | None,
        include_over: bool,
        before: KeyId | None,
        limit: int,
        now: datetime | None = None,
    ) -> list[ApiKey]:
        parameters = {
            "tenant_id": tenant_id,
            "include_over": include_over,
            "before": before,
            "limit": limit,
            "now": now,
        }
        statement = LIST_KEYS if tenant_id is None else LIST_KEYS_OF_TENANT
        return [tenant_rows.api_key(row) for row in await self._database.fetch(statement, parameters)]


async def _lock(transaction: Transaction, key_id: KeyId, now: datetime | None) -> tuple[ApiKey, datetime]:
    """The key, which nobody else changes before the end of the transaction, and the transaction's time."""
    found = await transaction.fetch(_LOCK_KEY, {"key_id": key_id, "now": now})
    if not found:
        raise UnknownKeyError(f"there is no key {key_id}")
    return tenant_rows.api_key(found[0]), found[0]["now"]


async def _insert(transaction: Transaction, key: ApiKey) -> None:
    inserted: Sequence[object] = await transaction.fetch(_INSERT_KEY, _parameters(key))
    if not inserted:
        raise AlreadyExistsError("another key has this id or prefix", reason=Reason.KEY_EXISTS)


def _parameters(key: ApiKey) -> Parameters:
    return {
        "key_id": key.key_id,
        "tenant_id": key.tenant.tenant_id,
        "name": key.name,
        "prefix": key.prefix,
        "key_hash": key.key_hash,
        "is_admin": key.is_admin,
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
        **tenant_rows.limit_parameters(key.limits),
    }
