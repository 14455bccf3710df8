"""A reservation from its making to its settlement, each step repeated and in any order."""

from collections.abc import Awaitable, Callable
from datetime import timedelta
from itertools import permutations

import pytest

from service_kit.ids import TenantId
from state_store.quota.port import QuotaCharge, QuotaKind, QuotaScope
from tests.contract.quota.steps import FREE, SECOND
from tests.support.quotas import (
    QuotaUnderTest,
    limited,
    settlement_of,
    subject_of,
)


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
