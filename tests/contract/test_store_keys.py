from datetime import timedelta

import pytest

from service_kit.errors import AlreadyExistsError
from service_kit.ids import KeyId, TenantId
from state_store.errors import UnknownTenantError
from state_store.model import PriorityClass
from tests.support.generations import NOW, TENANT, Store

KEY = KeyId("key-a")


async def test_a_key_is_found_by_its_prefix_with_its_tenant(store: Store) -> None:
    tenant = await store.create_tenant(TENANT, name="A", weight=2.5, max_class=PriorityClass.BATCH)
    expires_at = NOW + timedelta(days=1)
    key = await store.create_key(KEY, TENANT, prefix="sk-a", key_hash=b"\x00\xff", expires_at=expires_at)
    assert (key.tenant, key.key_hash, key.expires_at, key.revoked_at) == (tenant, b"\x00\xff", expires_at, None)
    assert (tenant.weight, tenant.max_class, tenant.disabled_at, key.is_admin) == (
        2.5,
        PriorityClass.BATCH,
        None,
        False,
    )
    assert await store.find_key("sk-a") == key
    assert await store.find_key("sk-b") is None
    assert await store.find_key("sk\x00") is None


async def test_creating_tenant_or_key_again_returns_the_first(store: Store) -> None:
    first = await store.create_tenant(TENANT, name="A")
    assert await store.create_tenant(TENANT, name="B", weight=9) == first
    key = await store.create_key(KEY, TENANT, prefix="sk-a", key_hash=b"1")
    assert await store.create_key(KEY, TENANT, prefix="sk-b", key_hash=b"2") == key
    assert await store.find_key("sk-b") is None


async def test_a_key_needs_a_tenant_and_a_prefix_of_its_own(store: Store) -> None:
    with pytest.raises(UnknownTenantError):
        await store.create_key(KEY, TenantId("nobody"), prefix="sk-a", key_hash=b"1")
    await store.create_tenant(TENANT, name="A")
    await store.create_key(KEY, TENANT, prefix="sk-a", key_hash=b"1")
    with pytest.raises(AlreadyExistsError):
        await store.create_key(KeyId("key-b"), TENANT, prefix="sk-a", key_hash=b"2")


async def test_a_key_is_revoked_once_and_still_found(store: Store) -> None:
    await store.create_tenant(TENANT, name="A")
    await store.create_key(KEY, TENANT, prefix="sk-a", key_hash=b"1")
    assert await store.revoke_key(KEY, now=NOW)
    assert not await store.revoke_key(KEY, now=NOW + timedelta(days=1))
    assert not await store.revoke_key(KeyId("unknown"))
    key = await store.find_key("sk-a")
    assert key is not None
    assert key.revoked_at == NOW
