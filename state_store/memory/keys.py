"""API keys in memory."""

from dataclasses import replace
from datetime import datetime, timedelta

from service_kit.errors import AlreadyExistsError, Reason
from service_kit.ids import KeyId, TenantId
from state_store.errors import UnknownKeyError
from state_store.memory.tenants import Change, MemoryTenants
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


class MemoryKeys(MemoryTenants):
    """The keys' part of TenantStore. Keys are kept with the tenant of their making and read with the tenant of now."""

    async def find_key(self, prefix: str) -> ApiKey | None:
        return next((key for key in self._keys() if key.prefix == prefix), None)

    async def create_key(self, new: NewKey, *, actor: str) -> ApiKey:
        tenant = self._tenant(new.tenant_id)
        self._refuse_taken(new.key_id, new.prefix)
        at = self._clock()
        key = made_key(new, tenant, at)
        self._data.keys[key.key_id] = key
        self._record(Change(actor=actor, action="key.create", target=key.key_id, details=key_details(key)), at)
        return key

    async def update_key(self, key_id: KeyId, change: KeyChange, *, actor: str) -> ApiKey:
        before = self._key(key_id)
        after = changed_key(before, change)
        details = difference(key_details(before), key_details(after))
        if details:
            self._data.keys[key_id] = after
            written = Change(actor=actor, action="key.update", target=key_id, details=details)
            self._record(written, self._clock())
        return after

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
        at = self._at(now)
        old = self._key(key_id)
        if is_over(old, at):
            raise UnknownKeyError(f"the key {key_id} is over")
        self._refuse_taken(new_key_id, prefix)
        new = replace(old, key_id=new_key_id, prefix=prefix, key_hash=key_hash, created_at=at)
        replaced = replaced_key(old, at, overlap)
        self._data.keys |= {new_key_id: new, key_id: replaced}
        details = rotation_details(old, new, replaced)
        self._record(Change(actor=actor, action="key.rotate", target=key_id, details=details), at)
        return RotatedKey(key=new, replaced=replaced)

    async def revoke_key(self, key_id: KeyId, *, actor: str, now: datetime | None = None) -> ApiKey:
        key = self._key(key_id)
        if key.revoked_at is not None:
            return key
        at = self._at(now)
        revoked = replace(key, revoked_at=at)
        self._data.keys[key_id] = revoked
        details = {"tenant": key.tenant.tenant_id, "prefix": key.prefix}
        self._record(Change(actor=actor, action="key.revoke", target=key_id, details=details), at)
        return revoked

    async def list_keys(
        self,
        *,
        tenant_id: TenantId | None,
        include_over: bool,
        before: KeyId | None,
        limit: int,
        now: datetime | None = None,
    ) -> list[ApiKey]:
        at = self._at(now)
        start = self._data.keys.get(before) if before is not None else None
        if before is not None and start is None:
            return []
        found = [
            key
            for key in sorted(self._keys(), key=_age, reverse=True)
            if tenant_id in (None, key.tenant.tenant_id)
            and (include_over or not is_over(key, at))
            and (start is None or _age(key) < _age(start))
        ]
        return found[:limit]

    def _keys(self) -> list[ApiKey]:
        return [replace(key, tenant=self._data.tenants[key.tenant.tenant_id]) for key in self._data.keys.values()]

    def _key(self, key_id: KeyId) -> ApiKey:
        key = self._data.keys.get(key_id)
        if key is None:
            raise UnknownKeyError(f"there is no key {key_id}")
        return replace(key, tenant=self._data.tenants[key.tenant.tenant_id])

    def _refuse_taken(self, key_id: KeyId, prefix: str) -> None:
        if key_id in self._data.keys or any(key.prefix == prefix for key in self._data.keys.values()):
            raise AlreadyExistsError("another key has this id or prefix", reason=Reason.KEY_EXISTS)


def _age(key: ApiKey) -> tuple[datetime, KeyId]:
    return key.created_at, key.key_id
