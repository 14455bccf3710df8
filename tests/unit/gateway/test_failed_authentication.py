"""Floods of bad keys: what they cost, whom they keep out, and that good keys still get in."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.auth import Authenticator
from gateway.failed_authentication import FailedAuthentication, FailureLimits, peer_of
from service_kit.api_key import mint_api_key
from service_kit.errors import QuotaExceededError, Reason, SluiceError, UnauthenticatedError
from service_kit.ids import KeyId
from state_store.memory.store import MemoryStore
from state_store.tenants import ApiKey
from tests.support.tenants import ACTOR, add_tenant, new_key, store_key

FLOODER, OTHER = "ipv4:10.0.0.1:1000", "ipv4:10.0.0.2:1000"


class Rig:
    """An authenticator over a store that counts look-ups, at a time that the test sets."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.seconds = 0.0
        self.lookups: list[str] = []
        find_key = self.store.find_key

        async def counted(prefix: str) -> ApiKey | None:
            self.lookups.append(prefix)
            await asyncio.sleep(0)
            return await find_key(prefix)

        self.store.find_key = counted  # type: ignore[method-assign]
        started = datetime(2030, 1, 1, tzinfo=UTC)
        self.authenticator = Authenticator(
            self.store, now=lambda: started + timedelta(seconds=self.seconds), clock=lambda: self.seconds
        )

    async def ask(self, text: str | None, *, peer: str = FLOODER) -> ApiKey | SluiceError:
        metadata = [("authorization", f"Bearer {text}")] if text is not None else []
        try:
            return await self.authenticator.authenticate(metadata, peer=peer)
        except SluiceError as error:
            return error

    async def use_up(self) -> None:
        for number in range(10):
            # The port does not count: every connection has another one.
            assert isinstance(await self.ask(bad_key(), peer=f"ipv4:10.0.0.1:{number}"), UnauthenticatedError)


def bad_key() -> str:
    return mint_api_key()[0]


def is_too_many(outcome: Any) -> bool:
    return isinstance(outcome, QuotaExceededError) and outcome.reason == Reason.TOO_MANY_BAD_KEYS


async def test_after_ten_failures_further_bad_keys_cost_no_look_up_but_one_a_second() -> None:
    rig = Rig()
    await rig.use_up()
    assert len(rig.lookups) == 10
    assert isinstance(await rig.ask(bad_key()), UnauthenticatedError)  # the one of this second
    refused = [await rig.ask(bad_key()) for _ in range(100)]
    assert all(is_too_many(outcome) for outcome in refused)
    assert len(rig.lookups) == 11
    assert rig.authenticator.failures.refused == 100
    rig.seconds += 0.4
    outcome = await rig.ask(bad_key())
    assert isinstance(outcome, QuotaExceededError)
    assert outcome.retry_after == timedelta(seconds=0.6)
    rig.seconds += 0.6
    assert isinstance(await rig.ask(bad_key()), UnauthenticatedError)
    assert len(rig.lookups) == 12


async def test_keys_that_come_all_at_once_are_limited_as_well() -> None:
    rig = Rig()
    outcomes = await asyncio.gather(*(rig.ask(bad_key()) for _ in range(200)))
    assert len(rig.lookups) == 11
    assert sum(is_too_many(outcome) for outcome in outcomes) == 189


async def test_a_good_key_of_the_flooders_address_gets_in_with_the_next_look_up_and_then_stays_in() -> None:
    rig = Rig()
    key = await new_key(rig.store, "t")
    await rig.use_up()
    assert isinstance(await rig.ask(bad_key()), UnauthenticatedError)
    assert is_too_many(await rig.ask(key))
    rig.seconds += 1
    assert isinstance(await rig.ask(key), ApiKey)
    for _ in range(3):  # beyond the cache's five seconds, while the flood goes on and takes every look-up
        rig.seconds += 6
        assert isinstance(await rig.ask(bad_key()), UnauthenticatedError)
        assert is_too_many(await rig.ask(bad_key()))
        assert isinstance(await rig.ask(key), ApiKey)


async def test_what_needs_no_look_up_takes_nobodys_turn() -> None:
    rig = Rig()
    key, known_bad = await new_key(rig.store, "t"), bad_key()
    await rig.use_up()
    assert isinstance(await rig.ask(known_bad), UnauthenticatedError)
    rig.seconds += 1
    for text in (known_bad, None, "nonsense"):
        assert is_too_many(await rig.ask(text))
    assert isinstance(await rig.ask(key), ApiKey)


async def test_other_addresses_notice_nothing() -> None:
    rig = Rig()
    key = await new_key(rig.store, "t")
    await rig.use_up()
    assert isinstance(await rig.ask(key, peer=OTHER), ApiKey)
    assert isinstance(await rig.ask(bad_key(), peer=OTHER), UnauthenticatedError)


async def test_a_peer_is_free_again_when_its_failures_are_a_minute_old() -> None:
    rig = Rig()
    await rig.use_up()
    rig.seconds = 59.9
    assert isinstance(await rig.ask(bad_key()), UnauthenticatedError)
    assert is_too_many(await rig.ask(bad_key()))
    rig.seconds = 120
    for _ in range(10):
        assert isinstance(await rig.ask(bad_key()), UnauthenticatedError)


async def test_the_log_gets_one_line_per_peer_and_minute() -> None:
    rig = Rig()
    with capture_logs() as logs:
        for second in (0, 1, 2, 59, 60):
            rig.seconds = second
            await rig.ask(bad_key())
            await rig.ask(bad_key(), peer=OTHER)
    assert [(entry["peer"], entry["failed"]) for entry in logs] == [
        ("10.0.0.1", 1),
        ("10.0.0.2", 2),
        ("10.0.0.1", 9),
        ("10.0.0.2", 10),
    ]
    assert rig.authenticator.failures.failed == 10


async def test_whatever_is_wrong_the_answer_is_the_same_and_so_is_the_number_of_comparisons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    good = await new_key(rig.store, "t")
    expired, revoked = bad_key_pair(), bad_key_pair()
    await store_key(rig.store, "t", expired[1], expires_at=datetime(2029, 1, 1, tzinfo=UTC))
    await store_key(rig.store, "t", revoked[1], key_id="revoked")
    await rig.store.revoke_key(KeyId("revoked"), actor=ACTOR)
    wrong_secret = "-".join(good.split("-")[:3]) + "-" + "x" * 43
    comparisons: list[bytes] = []
    compare = type(expired[1]).is_proven_by
    monkeypatch.setattr(
        type(expired[1]), "is_proven_by", lambda self, stored: comparisons.append(stored) or compare(self, stored)
    )
    seen = set()
    for text in (None, "nonsense", bad_key(), wrong_secret, expired[0], revoked[0]):
        comparisons.clear()
        outcome = await rig.ask(text)
        assert isinstance(outcome, UnauthenticatedError)
        seen.add((type(outcome), outcome.message, outcome.reason, tuple(outcome.metadata), len(comparisons)))
    assert len(seen) == 1


def bad_key_pair() -> tuple[str, Any]:
    return mint_api_key()


async def test_a_revoked_key_is_no_better_than_an_unknown_one_when_its_peer_is_limited() -> None:
    rig = Rig()
    await add_tenant(rig.store, "t")
    text, presented = mint_api_key()
    await store_key(rig.store, "t", presented, key_id="k")
    assert isinstance(await rig.ask(text), ApiKey)
    await rig.store.revoke_key(KeyId("k"), actor=ACTOR)
    rig.seconds = 5
    assert isinstance(await rig.ask(text), UnauthenticatedError)
    await rig.use_up()
    assert is_too_many(await rig.ask(text))


def test_the_peers_remembered_are_bounded_and_the_oldest_failure_goes_first() -> None:
    failures = FailedAuthentication(FailureLimits(max_failures=1, max_peers=3))
    for number in range(3):
        failures.note_failure(f"p{number}", 0)
    failures.note_failure("p0", 1)
    failures.note_failure("p3", 2)
    assert [failures.is_limited(f"p{number}", 2) for number in range(4)] == [True, False, True, True]


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        ("ipv4:127.0.0.1:50051", "127.0.0.1"),
        ("ipv6:%5B::1%5D:50051", "::/64"),
        ("ipv6:[2001:db8:1:2:3:4:5:6]:443", "2001:db8:1:2::/64"),
        ("ipv6:%5Bfe80::1%25eth0%5D:443", "fe80::/64"),
        ("ipv6:[::ffff:10.0.0.1]:443", "10.0.0.1"),
        ("unix:", "unix"),
        ("unix:/run/sluice.sock", "unix"),
        ("", ""),
    ],
)
def test_a_peer_is_an_address_without_its_port(text: str, peer: str) -> None:
    assert peer_of(text) == peer
