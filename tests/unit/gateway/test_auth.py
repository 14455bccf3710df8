import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from gateway.auth import Authenticator
from service_kit.api_key import mint_api_key, parse_api_key
from service_kit.errors import UnauthenticatedError
from service_kit.ids import KeyId
from state_store.errors import StoreUnavailableError
from state_store.memory.store import MemoryStore
from state_store.tenants import ApiKey
from tests.support.tenants import add_tenant, store_key

PEER = "ipv4:10.0.0.1:5000"


class CountingStore(MemoryStore):
    """Counts look-ups; can be away."""

    num_lookups = 0
    is_away = False

    async def find_key(self, prefix: str) -> ApiKey | None:
        self.num_lookups += 1
        await asyncio.sleep(0)
        if self.is_away:
            raise StoreUnavailableError("away")
        return await super().find_key(prefix)


class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = datetime(2030, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


async def rig(expires_in: timedelta | None = None) -> tuple[CountingStore, Authenticator, Clock, str, KeyId]:
    store, clock = CountingStore(), Clock()
    text, presented = mint_api_key()
    key_id = KeyId("k")
    await add_tenant(store, "t")
    expires_at = clock.now + expires_in if expires_in else None
    await store_key(store, "t", presented, key_id=key_id, expires_at=expires_at)
    return store, Authenticator(store, now=clock), clock, text, key_id


def metadata(text: str) -> list[tuple[str, str | bytes]]:
    return [("user-agent", "x"), ("authorization", f"Bearer {text}")]


async def test_a_valid_key_gives_its_tenant_and_is_looked_up_once_in_five_seconds() -> None:
    store, authenticator, clock, text, key_id = await rig()
    for _ in range(3):
        assert (await authenticator.authenticate(metadata(text), peer=PEER)).key_id == key_id
    assert store.num_lookups == 1
    clock.now += timedelta(seconds=5)
    await authenticator.authenticate(metadata(text), peer=PEER)
    assert store.num_lookups == 2


async def test_calls_that_come_at_once_share_one_lookup_even_when_one_leaves() -> None:
    store, authenticator, _, text, key_id = await rig()
    calls = [asyncio.create_task(authenticator.authenticate(metadata(text), peer=PEER)) for _ in range(10)]
    await asyncio.sleep(0)
    calls[0].cancel()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert {result.key_id for result in results[1:] if isinstance(result, ApiKey)} == {key_id}
    assert store.num_lookups == 1


async def test_a_revoked_key_lives_for_at_most_five_seconds() -> None:
    store, authenticator, clock, text, key_id = await rig()
    await authenticator.authenticate(metadata(text), peer=PEER)
    await store.revoke_key(key_id, actor="operator:test")
    clock.now += timedelta(seconds=5)
    with pytest.raises(UnauthenticatedError):
        await authenticator.authenticate(metadata(text), peer=PEER)


async def test_a_key_expires_by_the_clock_and_not_by_the_cache() -> None:
    _, authenticator, clock, text, _ = await rig(expires_in=timedelta(seconds=2))
    await authenticator.authenticate(metadata(text), peer=PEER)
    clock.now += timedelta(seconds=2)
    with pytest.raises(UnauthenticatedError):
        await authenticator.authenticate(metadata(text), peer=PEER)


async def test_the_right_prefix_with_another_secret_is_refused_also_from_the_cache() -> None:
    _, authenticator, _, text, _ = await rig()
    wrong = "-".join(text.split("-")[:3]) + "-" + "x" * 43
    for _ in range(2):
        with pytest.raises(UnauthenticatedError):
            await authenticator.authenticate(metadata(wrong), peer=PEER)
    await authenticator.authenticate(metadata(text), peer=PEER)


async def test_unknown_prefixes_are_remembered_too() -> None:
    store, authenticator, _, _, _ = await rig()
    stranger, _ = mint_api_key()
    for _ in range(3):
        with pytest.raises(UnauthenticatedError):
            await authenticator.authenticate(metadata(stranger), peer=PEER)
    assert store.num_lookups == 1


async def test_a_store_that_is_away_is_not_a_bad_key_and_is_asked_again() -> None:
    store, authenticator, _, text, key_id = await rig()
    store.is_away = True
    with pytest.raises(StoreUnavailableError):
        await authenticator.authenticate(metadata(text), peer=PEER)
    store.is_away = False
    assert (await authenticator.authenticate(metadata(text), peer=PEER)).key_id == key_id


def test_keys_have_one_form_and_do_not_show_their_hash() -> None:
    text, presented = mint_api_key()
    assert parse_api_key(text) == presented
    assert presented.is_proven_by(presented.key_hash)
    assert presented.key_hash.hex() not in repr(presented)
    assert repr(presented.key_hash) not in repr(presented)
    for bad in ("", "sk-sluice-", text + "!", text[:30], text.upper(), "sk-other-" + text[10:]):
        assert parse_api_key(bad) is None
