"""The scripts in Valkey against the memory twin: whatever is done to both, they say the same.

Beside that each keeps the counts: live ones are the reservations, and what nobody reserved is not counted.
"""

import asyncio
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from service_kit.ids import KeyId, TenantId
from sluice.local.valkey import LocalValkey
from state_store.quota.errors import LimitReachedError
from state_store.quota.port import PastUse, QuotaCharge, QuotaKind, QuotaScope, QuotaStanding, QuotaSubject
from state_store.tenants import QuotaLimits
from tests.support.clock import SteppedClock
from tests.support.quotas import (
    START,
    Quota,
    QuotaUnderTest,
    memory_quota,
    settlement_of,
    subject_of,
    valkey_quota,
)

TENANTS = [TenantId("t0"), TenantId("t1")]
KEYS = {tenant: [KeyId(f"{tenant}-k0"), KeyId(f"{tenant}-k1")] for tenant in TENANTS}
OWNERS = [(tenant, key) for tenant in TENANTS for key in KEYS[tenant]]
LIMIT = st.none() | st.integers(1, 6)
LIMITS = st.builds(
    lambda requests, tokens, concurrent, day, month: QuotaLimits(
        requests_per_minute=requests,
        tokens_per_minute=tokens and tokens * 10,
        max_concurrent=concurrent,
        tokens_per_day=day and day * 15,
        tokens_per_month=month and month * 20,
    ),
    *[LIMIT] * 5,
)
PICK = st.integers(0, 40)
MINUTES = st.sampled_from([0.001, 0.9, 1.0, 7.5, 20.0, 41.0, 59.999, 61.0, 3_600.0, 43_200.0])
Answer = list[QuotaStanding] | tuple[str, timedelta, tuple[QuotaStanding, ...]]


class QuotaMachine(RuleBasedStateMachine):
    """`runner` and `valkey` are set by the test."""

    runner: asyncio.Runner
    valkey: QuotaUnderTest

    @initialize()
    def begin(self) -> None:
        self.clock = SteppedClock(START)
        self.twin = memory_quota(self.clock)
        self.valkey.clock = self.clock
        for quota in (self.valkey.quota, self.valkey.other):
            quota._clock = self.clock
        self.both: list[QuotaUnderTest] = [self.twin, self.valkey]
        self.charges: list[QuotaCharge] = []
        self.num_steps = 0
        for each in self.both:
            self.await_(each.lose_all())
            self.await_(each.make_ready())

    def await_(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def pick(self, number: int) -> QuotaCharge:
        return self.charges[number % len(self.charges)] if self.charges else self.twin.charge()

    def equal(self, answers: list[Any]) -> Any:
        assert answers[0] == answers[1]
        return answers[0]

    @rule(owner=st.sampled_from(OWNERS), tokens=st.integers(2, 30), tenant=LIMITS, key=LIMITS, repeats=st.booleans())
    def reserve(
        self, owner: tuple[TenantId, KeyId], tokens: int, tenant: QuotaLimits, key: QuotaLimits, repeats: bool
    ) -> None:
        tenant_id, key_id = owner
        charge = self.twin.charge(tokens, tenant_id=tenant_id, key_id=key_id)
        if repeats and self.charges:
            charge = self.charges[-1]
        subject = subject_of(tenant=tenant, key=key, tenant_id=charge.tenant_id, key_id=charge.key_id)
        before = [self.await_(each.used(charge.tenant_id, charge.key_id)) for each in self.both]
        answer = self.equal([self.await_(_reserve(each.quota, charge, subject)) for each in self.both])
        if isinstance(answer, tuple):
            assert [self.await_(each.used(charge.tenant_id, charge.key_id)) for each in self.both] == before
        elif charge not in self.charges:
            self.charges.append(charge)

    @rule(owner=st.sampled_from(OWNERS), tenant=LIMITS, key=LIMITS)
    def look(self, owner: tuple[TenantId, KeyId], tenant: QuotaLimits, key: QuotaLimits) -> None:
        subject = subject_of(tenant=tenant, key=key, tenant_id=owner[0], key_id=owner[1])
        self.equal([self.await_(_look(each.other, subject)) for each in self.both])

    @rule(picks=st.lists(PICK, min_size=1, max_size=4))
    def bind(self, picks: list[int]) -> None:
        """Also of one that was never reserved, if there is no other."""
        charges = [self.pick(number) for number in picks]
        for each in self.both:
            self.await_(each.quota.bind_many(charges))
        self.charges += [charge for charge in charges if charge not in self.charges]

    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        charge = self.pick(pick)
        for each in self.both:
            self.await_(each.other.release_many([charge]))

    @rule(pick=PICK, used=st.integers(1, 30))
    def settle(self, pick: int, used: int) -> None:
        charge = self.pick(pick)
        settlement = settlement_of(charge, min(used, charge.tokens))
        for each in self.both:
            self.await_(each.quota.settle_many([settlement]))

    @rule(seconds=MINUTES)
    def let_time_pass(self, seconds: float) -> None:
        self.clock.advance(timedelta(seconds=seconds))

    @rule(keeps=st.booleans())
    def compare_what_is_due(self, keeps: bool) -> None:
        due = self.equal([sorted(self.await_(each.quota.due_many(limit=100))) for each in self.both])
        known = [charge for charge in self.charges if charge.generation_id in due]
        for each in self.both:
            self.await_(each.quota.bind_many(known) if keeps else each.quota.drop_many(due))
            assert self.await_(each.quota.due_many(limit=100)) == []

    @rule(live=st.lists(st.integers(2, 30), max_size=3), past=st.lists(st.integers(0, 70), max_size=3))
    def empty_and_rebuild(self, live: list[int], past: list[int]) -> None:
        now = self.clock()
        charges = [
            self.twin.charge(tokens, tenant_id=OWNERS[number][0], key_id=OWNERS[number][1])
            for number, tokens in enumerate(live)
        ]
        uses = [
            PastUse(
                tenant_id=OWNERS[number][0],
                key_id=OWNERS[number][1],
                by_second=((now - timedelta(seconds=ago), 1, 5), (now, 2, 3)),
                day_tokens=8,
                month_tokens=9,
            )
            for number, ago in enumerate(past)
        ]
        for each in self.both:
            self.await_(each.lose_all())
            assert self.await_(each.other.begin_rebuild())
            assert not self.await_(each.quota.begin_rebuild())
            self.await_(each.other.rebuild(charges[:1], uses))
            self.await_(each.other.rebuild(charges, []))
            self.await_(each.other.mark_ready())
        self.charges = charges

    @invariant()
    def both_count_the_same(self) -> None:
        """One key after each step, in turn: a difference stays long enough to be seen."""
        self.num_steps += 1
        self.compare(OWNERS[self.num_steps % len(OWNERS)])

    def teardown(self) -> None:
        for owner in OWNERS:
            self.compare(owner)

    def compare(self, owner: tuple[TenantId, KeyId]) -> None:
        tenant_id, key_id = owner
        used = self.equal([self.await_(each.used(tenant_id, key_id)) for each in self.both])
        live = [each for each in self._live() if each.tenant_id == tenant_id]
        assert used[QuotaScope.TENANT, QuotaKind.MAX_CONCURRENT] == len(live)
        assert all(number >= 0 for number in used.values())

    def _live(self) -> list[QuotaCharge]:
        return [charge for charge in self.charges if charge.generation_id in self.twin.quota._data.reservations]


async def _reserve(quota: Quota, charge: QuotaCharge, subject: QuotaSubject) -> Answer:
    try:
        return await quota.reserve(charge, subject)
    except LimitReachedError as error:
        return error.subject, error.retry_after, error.standing


async def _look(quota: Quota, subject: QuotaSubject) -> Answer:
    try:
        return await quota.look(subject)
    except LimitReachedError as error:
        return error.subject, error.retry_after, error.standing


def test_valkey_and_the_twin_count_the_same(valkey_server: LocalValkey) -> None:
    with asyncio.Runner() as runner:
        context = valkey_quota(valkey_server.url, SteppedClock(START))
        under_test = runner.run(context.__aenter__())

        class Machine(QuotaMachine):
            pass

        Machine.runner, Machine.valkey = runner, under_test
        try:
            run_state_machine_as_test(
                Machine,
                settings=settings(
                    max_examples=25,
                    stateful_step_count=30,
                    deadline=None,
                    database=None,
                    suppress_health_check=list(HealthCheck),
                ),
            )
        finally:
            runner.run(context.__aexit__(None, None, None))
