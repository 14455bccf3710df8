"""Rules of the quotas, on the memory twin and on real Valkey."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from itertools import permutations

import pytest

from service_kit.ids import KeyId, TenantId
from sluice.local.valkey import LocalValkey
from state_store.quota.errors import LimitReachedError, QuotaNotReadyError
from state_store.quota.port import QuotaCharge, QuotaKind, QuotaScope, QuotaSubject
from state_store.tenants import QuotaLimits
from tests.support.clock import SteppedClock
from tests.support.quotas import (
    KEY,
    START,
    TENANT,
    Quota,
    QuotaUnderTest,
    limited,
    memory_quota,
    settlement_of,
    standing,
    subject_of,
    valkey_quota,
)

SECOND = timedelta(seconds=1)
OTHER_KEY = KeyId("key-b")
EVERY_LIMIT = [(scope, kind) for scope in QuotaScope for kind in QuotaKind]
FREE = subject_of()


@pytest.fixture(params=["memory", "valkey"])
async def emptied(request: pytest.FixtureRequest) -> AsyncIterator[QuotaUnderTest]:
    clock = SteppedClock(START)
    if request.param == "memory":
        yield memory_quota(clock)
        return
    server: LocalValkey = request.getfixturevalue("valkey_server")
    async with valkey_quota(server.url, clock) as under_test:
        yield under_test


@pytest.fixture
async def under_test(emptied: QuotaUnderTest) -> QuotaUnderTest:
    await emptied.make_ready()
    return emptied


async def refusal(call: Awaitable[object]) -> LimitReachedError:
    with pytest.raises(LimitReachedError) as caught:
        await call
    return caught.value


async def admitted(quota: Quota, charge: QuotaCharge, subject: QuotaSubject) -> bool:
    try:
        await quota.reserve(charge, subject)
    except LimitReachedError:
        return False
    return True


@pytest.mark.parametrize(("scope", "kind"), EVERY_LIMIT)
async def test_two_gateways_at_once_admit_exactly_the_limit(
    under_test: QuotaUnderTest, scope: QuotaScope, kind: QuotaKind
) -> None:
    cost = 1 if kind in (QuotaKind.REQUESTS_PER_MINUTE, QuotaKind.MAX_CONCURRENT) else 10
    subject = limited(scope, kind, 7 * cost + cost // 2)
    charges = [under_test.charge(10) for _ in range(40)]
    quotas = [under_test.quota, under_test.other]
    answers = await asyncio.gather(
        *(admitted(quotas[number % 2], charge, subject) for number, charge in enumerate(charges))
    )
    assert answers.count(True) == 7
    assert await under_test.used_by_tenant() == [7, 70, 7, 70, 70]


@pytest.mark.parametrize(("scope", "kind"), EVERY_LIMIT)
async def test_a_refusal_names_the_limit_and_charges_nothing(
    under_test: QuotaUnderTest, scope: QuotaScope, kind: QuotaKind
) -> None:
    subject = limited(scope, kind, 1 if kind in (QuotaKind.REQUESTS_PER_MINUTE, QuotaKind.MAX_CONCURRENT) else 19)
    await under_test.quota.reserve(under_test.charge(10), subject)
    before = await under_test.used_by_tenant()
    refused = under_test.charge(10)
    error = await refusal(under_test.quota.reserve(refused, subject))
    owner = TENANT if scope is QuotaScope.TENANT else KEY
    assert error.subject == f"{scope.value}:{owner}:{kind.value}"
    assert [(each.scope, each.kind) for each in error.standing] == [(scope, kind)]
    assert await under_test.used_by_tenant() == before == [1, 10, 1, 10, 10]
    await under_test.quota.release_many([refused])
    assert await under_test.used_by_tenant() == before


async def test_a_limit_that_is_not_the_first_one_checked_charges_nothing_either(under_test: QuotaUnderTest) -> None:
    generous, mean = QuotaLimits(requests_per_minute=9, tokens_per_day=999), QuotaLimits(tokens_per_month=9)
    await refusal(under_test.quota.reserve(under_test.charge(10), subject_of(tenant=generous, key=mean)))
    assert await under_test.used_by_tenant() == [0] * 5


async def test_the_longest_wait_is_the_one_that_is_told(under_test: QuotaUnderTest) -> None:
    subject = subject_of(tenant=QuotaLimits(max_concurrent=1, tokens_per_minute=15), key=QuotaLimits(max_concurrent=1))
    await under_test.quota.reserve(under_test.charge(10), subject)
    error = await refusal(under_test.quota.reserve(under_test.charge(10), subject))
    assert error.subject == f"tenant:{TENANT}:tokens_per_minute"
    assert error.retry_after == timedelta(seconds=60.75)


async def test_a_look_refuses_for_rate_and_concurrency_alone_and_changes_nothing(under_test: QuotaUnderTest) -> None:
    await under_test.quota.reserve(under_test.charge(10), FREE)
    for kind in QuotaKind:
        for scope in QuotaScope:
            look = under_test.quota.look(limited(scope, kind, 1))
            if kind in (QuotaKind.REQUESTS_PER_MINUTE, QuotaKind.MAX_CONCURRENT):
                assert (await refusal(look)).standing[0].remaining == 0
            else:
                assert [(each.limit, each.remaining) for each in await look] == [(1, 0)]
    assert await under_test.used_by_tenant() == [1, 10, 1, 10, 10]
    assert await under_test.quota.look(FREE) == []


async def test_the_standing_tells_limits_what_is_left_and_until_when(under_test: QuotaUnderTest) -> None:
    limits = QuotaLimits(
        requests_per_minute=5, tokens_per_minute=100, max_concurrent=3, tokens_per_day=200, tokens_per_month=300
    )
    subject, scope = subject_of(tenant=limits, key=QuotaLimits(max_concurrent=1)), QuotaScope.TENANT
    to_midnight_ms, to_february_ms = 12 * 3_600_000 - 250, 36 * 3_600_000 - 250
    assert await under_test.quota.reserve(under_test.charge(10), subject) == [
        standing(scope, QuotaKind.REQUESTS_PER_MINUTE, 5, 4, 60_750),
        standing(scope, QuotaKind.TOKENS_PER_MINUTE, 100, 90, 60_750),
        standing(scope, QuotaKind.MAX_CONCURRENT, 3, 2, 0),
        standing(scope, QuotaKind.TOKENS_PER_DAY, 200, 190, to_midnight_ms),
        standing(scope, QuotaKind.TOKENS_PER_MONTH, 300, 290, to_february_ms),
        standing(QuotaScope.KEY, QuotaKind.MAX_CONCURRENT, 1, 0, 0),
    ]
    under_test.clock.advance(30 * SECOND)
    looked = await under_test.quota.look(subject_of(tenant=limits))
    assert [each.remaining for each in looked] == [4, 90, 2, 190, 290]
    assert [each.reset.total_seconds() for each in looked] == [30.75, 30.75, 0, 43_169.75, 129_569.75]
    unused = subject_of(tenant=limits, tenant_id=TenantId("other"))
    assert {each.reset for each in await under_test.quota.look(unused)} == {timedelta(0)}


async def test_never_more_than_the_limit_falls_into_any_60_seconds(under_test: QuotaUnderTest) -> None:
    """Tried all the time: each is admitted when the third one before it has just left the last 60 s, and not earlier."""
    subject, times = limited(QuotaScope.TENANT, QuotaKind.REQUESTS_PER_MINUTE, 3), []
    for _ in range(400):
        if await admitted(under_test.quota, under_test.charge(), subject):
            times.append(under_test.clock())
        under_test.clock.advance(timedelta(milliseconds=700))
    gaps = [later - earlier for earlier, later in zip(times, times[3:], strict=False)]
    assert len(times) >= 12
    assert all(60 * SECOND <= gap <= 62 * SECOND for gap in gaps)


@pytest.mark.parametrize("kind", [QuotaKind.REQUESTS_PER_MINUTE, QuotaKind.TOKENS_PER_MINUTE])
async def test_what_was_refused_fits_exactly_when_it_was_told_to_come_back(
    under_test: QuotaUnderTest, kind: QuotaKind
) -> None:
    subject = limited(QuotaScope.KEY, kind, 2 if kind is QuotaKind.REQUESTS_PER_MINUTE else 29)
    for _ in range(2):
        await under_test.quota.reserve(under_test.charge(10), subject)
        under_test.clock.advance(timedelta(seconds=10.1))
    retry_after = (await refusal(under_test.quota.reserve(under_test.charge(10), subject))).retry_after
    under_test.clock.advance(retry_after - timedelta(milliseconds=1))
    await refusal(under_test.quota.reserve(under_test.charge(10), subject))
    under_test.clock.advance(timedelta(milliseconds=1))
    await under_test.quota.reserve(under_test.charge(10), subject)


@pytest.mark.parametrize(
    ("kind", "at", "until"),
    [
        (QuotaKind.TOKENS_PER_DAY, datetime(2028, 2, 28, 23, 0, tzinfo=UTC), datetime(2028, 2, 29, tzinfo=UTC)),
        (QuotaKind.TOKENS_PER_MONTH, datetime(2028, 2, 28, 23, 0, tzinfo=UTC), datetime(2028, 3, 1, tzinfo=UTC)),
        (QuotaKind.TOKENS_PER_MONTH, datetime(2030, 12, 31, 23, 59, tzinfo=UTC), datetime(2031, 1, 1, tzinfo=UTC)),
        (QuotaKind.TOKENS_PER_MONTH, datetime(2100, 2, 1, tzinfo=UTC), datetime(2100, 3, 1, tzinfo=UTC)),
    ],
)
async def test_days_and_months_are_those_of_utc(
    under_test: QuotaUnderTest, kind: QuotaKind, at: datetime, until: datetime
) -> None:
    under_test.clock.advance(at - under_test.clock())
    subject = limited(QuotaScope.TENANT, kind, 15)
    first = under_test.charge(10)
    await under_test.quota.reserve(first, subject)
    await under_test.quota.settle_many([settlement_of(first, 10)])
    error = await refusal(under_test.quota.reserve(under_test.charge(10), subject))
    assert error.retry_after == until - at
    under_test.clock.advance(until - at)
    await under_test.quota.reserve(under_test.charge(10), subject)


async def test_tokens_that_only_live_generations_hold_may_be_free_soon(under_test: QuotaUnderTest) -> None:
    subject, charge = limited(QuotaScope.KEY, QuotaKind.TOKENS_PER_DAY, 15), under_test.charge(10)
    await under_test.quota.reserve(charge, subject)
    assert (await refusal(under_test.quota.reserve(under_test.charge(10), subject))).retry_after == SECOND
    await under_test.quota.settle_many([settlement_of(charge, 5)])
    await under_test.quota.reserve(under_test.charge(10), subject)


async def test_a_settlement_counts_what_was_used_where_it_was_charged_and_frees_the_place(
    under_test: QuotaUnderTest,
) -> None:
    charge = under_test.charge(10)
    await under_test.quota.reserve(charge, FREE)
    under_test.clock.advance(20 * SECOND)
    await under_test.quota.bind_many([charge])
    await under_test.quota.settle_many([settlement_of(charge, 4)])
    assert await under_test.used_by_tenant() == [1, 4, 0, 4, 4]
    under_test.clock.advance(timedelta(seconds=40.75))
    assert await under_test.used_by_tenant() == [0, 0, 0, 4, 4]


async def test_a_settlement_after_midnight_leaves_the_new_day_alone(under_test: QuotaUnderTest) -> None:
    charge = under_test.charge(10)
    await under_test.quota.reserve(charge, FREE)
    under_test.clock.advance(timedelta(hours=13))
    await under_test.quota.settle_many([settlement_of(charge, 4)])
    assert await under_test.used_by_tenant() == [0, 0, 0, 0, 4]
    under_test.clock.advance(timedelta(days=1))
    assert await under_test.used_by_tenant() == [0] * 5


async def test_a_release_gives_back_whole_what_is_not_bound(under_test: QuotaUnderTest) -> None:
    bound, unbound = under_test.charge(10), under_test.charge(20)
    for charge in (bound, unbound):
        await under_test.quota.reserve(charge, FREE)
    await under_test.quota.bind_many([bound])
    await under_test.quota.release_many([bound, unbound, under_test.charge()])
    assert await under_test.used_by_tenant() == [1, 10, 1, 10, 10]


async def test_a_release_of_the_newest_charge_brings_the_reset_back(under_test: QuotaUnderTest) -> None:
    subject = limited(QuotaScope.TENANT, QuotaKind.REQUESTS_PER_MINUTE, 9)
    await under_test.quota.reserve(under_test.charge(10), subject)
    under_test.clock.advance(20 * SECOND)
    released = under_test.charge(10)
    await under_test.quota.reserve(released, subject)
    await under_test.quota.release_many([released])
    (left,) = await under_test.quota.look(subject)
    assert (left.remaining, left.reset) == (8, timedelta(seconds=40.75))


async def test_repeating_a_reservation_charges_nothing_even_at_the_limit(under_test: QuotaUnderTest) -> None:
    subject, charge = limited(QuotaScope.TENANT, QuotaKind.MAX_CONCURRENT, 1), under_test.charge()
    first = await under_test.quota.reserve(charge, subject)
    assert await under_test.other.reserve(charge, subject) == first
    assert await under_test.used_by_tenant() == [1, 10, 1, 10, 10]


def _steps(under_test: QuotaUnderTest, charge: QuotaCharge) -> dict[str, Callable[[], Awaitable[None]]]:
    return {
        "bind": lambda: under_test.quota.bind_many([charge]),
        "release": lambda: under_test.quota.release_many([charge]),
        "settle": lambda: under_test.quota.settle_many([settlement_of(charge, 4)]),
    }


@pytest.mark.parametrize("order", sorted(set(permutations(["bind", "settle", "settle", "bind"]))))
async def test_binding_and_settling_in_any_order_and_twice_counts_once(
    under_test: QuotaUnderTest, order: tuple[str, ...]
) -> None:
    charge = under_test.charge(10)
    await under_test.quota.reserve(charge, FREE)
    for step in order:
        await _steps(under_test, charge)[step]()
    assert await under_test.used_by_tenant() == [1, 4, 0, 4, 4]


@pytest.mark.parametrize(
    ("order", "used"),
    [
        (["release", "release"], [0, 0, 0, 0, 0]),
        (["release", "bind", "release"], [1, 10, 1, 10, 10]),
        (["bind", "release", "settle", "release"], [1, 4, 0, 4, 4]),
        (["release", "settle", "bind"], [0, 0, 0, 0, 0]),
        (["release", "bind", "settle", "bind"], [1, 4, 0, 4, 4]),
    ],
)
async def test_releases_among_the_other_steps(under_test: QuotaUnderTest, order: list[str], used: list[int]) -> None:
    charge = under_test.charge(10)
    await under_test.quota.reserve(charge, FREE)
    for step in order:
        await _steps(under_test, charge)[step]()
    assert await under_test.used_by_tenant() == used


async def test_a_bind_makes_a_lost_reservation_again_without_a_check_as_of_when_it_was_made(
    under_test: QuotaUnderTest,
) -> None:
    subject = limited(QuotaScope.TENANT, QuotaKind.MAX_CONCURRENT, 1)
    charge = under_test.charge(10)
    under_test.clock.advance(30 * SECOND)
    await under_test.quota.reserve(under_test.charge(10), subject)
    await under_test.quota.bind_many([charge, charge])
    assert await under_test.used_by_tenant() == [2, 20, 2, 20, 20]
    under_test.clock.advance(timedelta(seconds=30.75))
    assert await under_test.used_by_tenant() == [1, 10, 2, 20, 20]


async def test_unbound_reservations_fall_due_after_their_lease_and_bound_ones_after_15_s(
    under_test: QuotaUnderTest,
) -> None:
    bound, unbound = under_test.charge(10), under_test.charge(20)
    for charge in (bound, unbound):
        await under_test.quota.reserve(charge, FREE)
    await under_test.quota.bind_many([bound])
    under_test.clock.advance(timedelta(seconds=7.999))
    assert await under_test.other.due_many(limit=9) == []
    under_test.clock.advance(timedelta(milliseconds=1))
    assert await under_test.other.due_many(limit=9) == [unbound.generation_id]
    await under_test.other.drop_many([unbound.generation_id, bound.generation_id])
    assert await under_test.used_by_tenant() == [1, 10, 1, 10, 10]
    under_test.clock.advance(timedelta(seconds=6.999))
    assert await under_test.other.due_many(limit=9) == []
    under_test.clock.advance(timedelta(milliseconds=1))
    assert await under_test.other.due_many(limit=9) == [bound.generation_id]
    await under_test.quota.bind_many([bound])
    assert await under_test.other.due_many(limit=9) == []


async def test_what_is_bound_after_it_fell_due_is_not_dropped(under_test: QuotaUnderTest) -> None:
    charge = under_test.charge(10)
    await under_test.quota.reserve(charge, FREE)
    under_test.clock.advance(9 * SECOND)
    due = await under_test.other.due_many(limit=9)
    await under_test.quota.bind_many([charge])
    await under_test.other.drop_many(due)
    assert await under_test.used_by_tenant() == [1, 10, 1, 10, 10]


async def test_due_ones_come_in_pages_over_all_shards(under_test: QuotaUnderTest) -> None:
    charges = [under_test.charge(tenant_id=TenantId(f"tenant-{number}")) for number in range(12)]
    for charge in charges:
        await under_test.quota.reserve(charge, subject_of(tenant_id=charge.tenant_id))
    under_test.clock.advance(9 * SECOND)
    assert len(await under_test.quota.due_many(limit=5)) == 5
    due = await under_test.quota.due_many(limit=50)
    assert sorted(due) == sorted(charge.generation_id for charge in charges)
    await under_test.quota.drop_many(due)
    assert await under_test.quota.due_many(limit=50) == []


async def test_keys_of_a_tenant_share_its_limits_and_have_their_own(under_test: QuotaUnderTest) -> None:
    limits, own = QuotaLimits(max_concurrent=3), QuotaLimits(max_concurrent=2)
    ours = subject_of(tenant=limits, key=own)
    theirs = subject_of(tenant=limits, key=own, key_id=OTHER_KEY)
    for _ in range(2):
        await under_test.quota.reserve(under_test.charge(), ours)
    error = await refusal(under_test.quota.reserve(under_test.charge(), ours))
    assert error.subject == f"key:{KEY}:max_concurrent"
    await under_test.quota.reserve(under_test.charge(key_id=OTHER_KEY), theirs)
    error = await refusal(under_test.quota.reserve(under_test.charge(key_id=OTHER_KEY), theirs))
    assert error.subject == f"tenant:{TENANT}:max_concurrent"


async def test_a_limit_set_later_counts_what_was_used_before(under_test: QuotaUnderTest) -> None:
    await under_test.quota.reserve(under_test.charge(10), FREE)
    await refusal(under_test.quota.look(limited(QuotaScope.KEY, QuotaKind.REQUESTS_PER_MINUTE, 1)))


async def test_everything_but_a_rebuild_is_refused_until_the_emptied_quotas_are_marked_ready(
    under_test: QuotaUnderTest,
) -> None:
    quota, charge, subject = under_test.quota, under_test.charge(), limited(QuotaScope.KEY, QuotaKind.MAX_CONCURRENT, 1)
    await quota.reserve(charge, subject)
    assert await quota.is_ready()
    await under_test.lose_all()
    assert not await quota.is_ready()
    for refused in (
        quota.look(subject),
        quota.reserve(charge, subject),
        quota.bind_many([charge]),
        quota.release_many([charge]),
        quota.settle_many([settlement_of(charge, 1)]),
        quota.due_many(limit=1),
        quota.drop_many([charge.generation_id]),
        quota.rebuild([charge], []),
        quota.mark_ready(),
    ):
        with pytest.raises(QuotaNotReadyError):
            await refused
    assert await quota.begin_rebuild()
    await quota.rebuild([charge], [])
    await quota.mark_ready()
    assert await quota.is_ready()
    assert await under_test.used_by_tenant() == [1, 10, 1, 10, 10]
    assert not await quota.begin_rebuild()


async def test_new_quotas_are_not_ready(emptied: QuotaUnderTest) -> None:
    assert not await emptied.quota.is_ready()
    with pytest.raises(QuotaNotReadyError):
        await emptied.quota.reserve(emptied.charge(), FREE)
