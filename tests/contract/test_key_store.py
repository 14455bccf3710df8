"""API keys on both adapters."""

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest

from service_kit.api_key import mint_api_key
from service_kit.errors import AlreadyExistsError, Reason
from service_kit.ids import KeyId, TenantId
from state_store.errors import UnknownKeyError, UnknownTenantError
from state_store.tenant_changes import is_over
from state_store.tenant_store import KeyChange, NewKey, RotatedKey, TenantChange
from state_store.tenants import ApiKey, QuotaLimits
from tests.support.generations import NOW, TENANT, Store
from tests.support.tenants import ACTOR, add_tenant

KEY = KeyId("key-a")
NEW = KeyId("key-b")
HOUR = timedelta(hours=1)
LIMITS = QuotaLimits(requests_per_minute=5, tokens_per_month=9)


async def made(store: Store, name: str = "a", tenant: str = TENANT, **fields) -> ApiKey:
    await add_tenant(store, tenant)
    new = NewKey(key_id=KeyId(f"key-{name}"), tenant_id=TenantId(tenant), prefix=name, key_hash=name.encode())
    return await store.create_key(replace(new, **fields), actor=ACTOR)


async def rotated(store: Store, overlap: timedelta, **fields) -> RotatedKey:
    given = {"new_key_id": NEW, "prefix": "b", "key_hash": b"new", "actor": ACTOR, "now": NOW, **fields}
    return await store.rotate_key(KEY, overlap=overlap, **given)


async def listed(store: Store, **fields) -> list[str]:
    given = {"tenant_id": None, "include_over": False, "before": None, "limit": 99, "now": NOW, **fields}
    return [key.key_id for key in await store.list_keys(**given)]


async def actions(store: Store, target: str) -> list[str]:
    return [entry.action for entry in await store.list_audit(target=target, before=None, limit=9)]


async def test_a_key_is_found_by_its_prefix_with_its_tenant_as_it_is_now(store: Store) -> None:
    key = await made(
        store,
        name="a",
        key_hash=b"\x00\xff",
        is_admin=True,
        limits=LIMITS,
        expires_at=NOW + HOUR,
    )
    assert (key.key_hash, key.is_admin, key.limits, key.expires_at, key.revoked_at) == (
        b"\x00\xff",
        True,
        LIMITS,
        NOW + HOUR,
        None,
    )
    assert await store.find_key("a") == key
    assert await store.find_key("b") is None
    assert await store.find_key("a\x00") is None
    tenant = await store.update_tenant(TENANT, TenantChange(weight=7, is_disabled=True), actor=ACTOR)
    assert await store.find_key("a") == replace(key, tenant=tenant)


async def test_a_key_needs_a_tenant_and_an_id_and_prefix_of_its_own(store: Store) -> None:
    with pytest.raises(UnknownTenantError):
        await store.create_key(NewKey(key_id=KEY, tenant_id=TenantId("nobody"), prefix="a", key_hash=b"1"), actor=ACTOR)
    assert await store.list_audit(target=None, before=None, limit=9) == []
    key = await made(store)
    for fields in ({"prefix": "c"}, {"key_id": NEW}):
        with pytest.raises(AlreadyExistsError) as refused:
            await made(store, **fields)
        assert refused.value.reason == Reason.KEY_EXISTS
    assert await listed(store) == [KEY]
    assert await store.find_key("a") == key
    assert (await actions(store, KEY), await actions(store, NEW)) == (["key.create"], [])


async def test_limits_of_a_key_named_by_changes_at_once_all_hold_and_the_others_stay(store: Store) -> None:
    key = await made(store, limits=LIMITS)
    named = {"requests_per_minute": None, "tokens_per_minute": 8, "tokens_per_month": 9}
    changes = [KeyChange(named_limits={name: limit}) for name, limit in named.items()]
    await asyncio.gather(*(store.update_key(KEY, change, actor=ACTOR) for change in changes))
    limits = replace(LIMITS, requests_per_minute=None, tokens_per_minute=8, tokens_per_month=9)
    assert await store.find_key("a") == replace(key, limits=limits)


async def test_a_key_changes_in_what_is_named_and_only_changes_are_written_down(store: Store) -> None:
    key = await made(store, limits=LIMITS)
    assert await store.update_key(KEY, KeyChange(name="ci"), actor="key:boss") == replace(key, name="ci")
    change = KeyChange(limits=QuotaLimits(), expires_at=NOW + HOUR)
    after = await store.update_key(KEY, change, actor=ACTOR)
    assert after == replace(key, name="ci", limits=QuotaLimits(), expires_at=NOW + HOUR) == await store.find_key("a")
    assert await store.update_key(KEY, change, actor=ACTOR) == after
    with pytest.raises(UnknownKeyError):
        await store.update_key(NEW, change, actor=ACTOR)
    [second, first, _] = await store.list_audit(target=KEY, before=None, limit=9)
    assert (first.action, first.actor, first.target, first.details) == (
        "key.update",
        "key:boss",
        KEY,
        {"name": " -> ci"},
    )
    assert second.details["limits.requests_per_minute"] == "5 -> unlimited"
    assert second.details["expires_at"] == f"never -> {(NOW + HOUR).isoformat()}"


async def test_a_rotated_key_stays_in_force_for_the_overlap(store: Store) -> None:
    old = await made(store, is_admin=True, limits=LIMITS)
    old = await store.update_key(KEY, KeyChange(name="ci"), actor=ACTOR)
    result = await rotated(store, HOUR)
    assert result.replaced == replace(old, expires_at=NOW + HOUR) == await store.find_key("a")
    assert result.key == replace(old, key_id=NEW, prefix="b", key_hash=b"new", created_at=NOW)
    assert result.key == await store.find_key("b")
    assert not is_over(result.replaced, NOW + HOUR - timedelta(microseconds=1))
    assert is_over(result.replaced, NOW + HOUR)
    [entry, *_] = await store.list_audit(target=KEY, before=None, limit=9)
    assert (entry.action, entry.at, entry.details) == (
        "key.rotate",
        NOW,
        {
            "tenant": TENANT,
            "new_key_id": NEW,
            "new_prefix": "b",
            "expires_at": f"never -> {(NOW + HOUR).isoformat()}",
        },
    )


async def test_a_rotated_key_never_lives_longer_than_before(store: Store) -> None:
    await made(store, expires_at=NOW + HOUR)
    result = await rotated(store, 24 * HOUR)
    assert (result.replaced.expires_at, result.key.expires_at) == (NOW + HOUR, NOW + HOUR)
    third = await rotated(store, timedelta(0), new_key_id=KeyId("key-c"), prefix="c")
    assert third.replaced.expires_at == NOW
    assert await listed(store) == ["key-c", NEW]


@pytest.mark.parametrize("end", ["unknown", "revoked", "expired", "rotated"])
async def test_a_key_that_is_over_is_not_rotated(store: Store, end: str) -> None:
    if end != "unknown":
        await made(store, expires_at=NOW if end == "expired" else None)
    if end == "revoked":
        await store.revoke_key(KEY, actor=ACTOR, now=NOW)
    if end == "rotated":
        await rotated(store, timedelta(0), new_key_id=KeyId("key-c"), prefix="c")
    before = await store.list_audit(target=None, before=None, limit=9)
    with pytest.raises(UnknownKeyError) as refused:
        await rotated(store, HOUR)
    assert refused.value.reason == Reason.KEY_NOT_FOUND
    assert await store.find_key("b") is None
    assert await store.list_audit(target=None, before=None, limit=9) == before


async def test_a_rotation_whose_new_key_cannot_be_made_leaves_the_old_one_as_it_was(store: Store) -> None:
    old = await made(store)
    await made(store, "b")
    with pytest.raises(AlreadyExistsError):
        await rotated(store, timedelta(0), new_key_id=KeyId("key-c"))
    assert await store.find_key("a") == old
    assert await actions(store, KEY) == ["key.create"]


async def test_a_revocation_is_idempotent_written_down_once_and_its_row_stays(store: Store) -> None:
    key = await made(store)
    revoked = await store.revoke_key(KEY, actor=ACTOR, now=NOW)
    again = await store.revoke_key(KEY, actor=ACTOR, now=NOW + HOUR)
    assert revoked == again == replace(key, revoked_at=NOW) == await store.find_key("a")
    assert await actions(store, KEY) == ["key.revoke", "key.create"]
    with pytest.raises(UnknownKeyError):
        await store.revoke_key(NEW, actor=ACTOR)


async def test_of_revocations_at_once_one_counts(store: Store) -> None:
    await made(store)
    answers = await asyncio.gather(*(store.revoke_key(KEY, actor=ACTOR, now=NOW + age * HOUR) for age in range(5)))
    assert len({answer.revoked_at for answer in answers}) == 1
    assert await actions(store, KEY) == ["key.revoke", "key.create"]


async def test_keys_are_paged_newest_first_by_tenant_and_without_those_that_are_over(store: Store) -> None:
    for name in ("a", "c", "d", "e"):
        await made(store, name, tenant="one" if name != "d" else "two")
    await store.revoke_key(KeyId("key-c"), actor=ACTOR, now=NOW)
    await store.update_key(KeyId("key-a"), KeyChange(expires_at=NOW), actor=ACTOR)
    assert await listed(store, include_over=True) == ["key-e", "key-d", "key-c", "key-a"]
    assert await listed(store) == ["key-e", "key-d"]
    assert await listed(store, now=NOW - HOUR) == ["key-e", "key-d", "key-a"]
    assert await listed(store, tenant_id="one", include_over=True) == ["key-e", "key-c", "key-a"]
    assert await listed(store, limit=1) == ["key-e"]
    assert await listed(store, before="key-e", include_over=True, limit=2) == ["key-d", "key-c"]
    assert await listed(store, before="key-c", include_over=True) == ["key-a"]
    assert await listed(store, before="key-unknown", include_over=True) == []


async def test_keys_of_one_moment_are_paged_by_id_byte_by_byte(store: Store) -> None:
    await made(store)
    names = ["key-B", "key-b", "key-a-", "key_b", "keyb"]
    for number, name in enumerate(names):
        await store.rotate_key(
            KEY,
            new_key_id=KeyId(name),
            prefix=f"p{number}",
            key_hash=b"",
            overlap=HOUR,
            actor=ACTOR,
            now=NOW - HOUR / 2,
        )
    pages: list[str] = []
    while page := await listed(store, before=pages[-1] if pages else None, limit=2):
        pages += page
    assert [name for name in pages if name != KEY] == sorted(names, reverse=True)


async def test_neither_secret_nor_hash_is_in_what_is_written_down_or_shown(store: Store) -> None:
    texts, presented = zip(*(mint_api_key() for _ in range(2)), strict=True)
    key = await made(store, prefix=presented[0].prefix, key_hash=presented[0].key_hash)
    result = await rotated(store, HOUR, prefix=presented[1].prefix, key_hash=presented[1].key_hash)
    await store.revoke_key(NEW, actor=ACTOR)
    shown = repr([await store.list_audit(target=None, before=None, limit=9), key, result])
    assert presented[0].prefix in shown
    for text, it in zip(texts, presented, strict=True):
        secret = text.split("-", maxsplit=3)[3]  # it may hold hyphens itself
        assert secret not in shown
        assert it.key_hash.hex() not in shown
        assert repr(it.key_hash) not in shown
