"""Minutes, days and months: when what was used stops to count."""

from datetime import UTC, datetime, timedelta

import pytest

from service_kit.ids import TenantId
from state_store.quota.port import QuotaKind, QuotaScope
from state_store.tenants import QuotaLimits
from tests.contract.quota.steps import SECOND, admitted, refusal
from tests.support.quotas import (
    TENANT,
    QuotaUnderTest,
    limited,
    settlement_of,
    standing,
    subject_of,
)


async def test_the_longest_wait_is_the_one_that_is_told(under_test: QuotaUnderTest) -> None:
    subject = subject_of(tenant=QuotaLimits(max_concurrent=1, tokens_per_minute=15), key=QuotaLimits(max_concurrent=1))
    await under_test.quota.reserve(under_test.charge(10), subject)
    error = await refusal(under_test.quota.reserve(under_test.charge(10), subject))
    assert error.subject == f"tenant:{TENANT}:tokens_per_minute"
    assert error.retry_after == timedelta(seconds=60.75)


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
