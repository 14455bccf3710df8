"""Limits of tenants and keys, and what a refusal says."""

import asyncio

import pytest

from state_store.quota.errors import QuotaNotReadyError
from state_store.quota.port import QuotaKind, QuotaScope
from state_store.tenants import QuotaLimits
from tests.contract.quota.steps import EVERY_LIMIT, FREE, OTHER_KEY, admitted, refusal
from tests.support.quotas import (
    KEY,
    TENANT,
    QuotaUnderTest,
    limited,
    settlement_of,
    subject_of,
)


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
