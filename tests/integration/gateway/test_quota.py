"""Limits as clients meet them: refusals with details, standing in the metadata, and attaching in spite of all."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from inference.v1 import inference_pb2, types_pb2
from service_kit.errors import Reason, UnavailableError
from service_kit.ids import GenerationId, TenantId
from service_kit.rpc_status import RpcFailure, parse_rpc_error
from state_store.quota.errors import QuotaUnavailableError
from state_store.quota.memory import MemoryQuota
from state_store.quota.port import QuotaCharge, QuotaKind, QuotaStanding, QuotaSubject
from state_store.tenant_store import TenantChange
from state_store.tenants import QuotaLimits
from tests.support.clock import SteppedClock
from tests.support.gateway import GatewayRig, MemoryScheduler, running_gateway
from tests.support.quotas import START, QuotaUnderTest
from tests.support.tenants import ACTOR, add_tenant

TENANT = "tenant"
COST = 13
"""Of a request here: 3 prompt tokens, 10 of output."""


class FlakyQuota(MemoryQuota):
    """Cannot be reached when told so; counts what was reserved."""

    is_reachable = True
    num_reserved = 0

    async def look(self, subject: QuotaSubject) -> list[QuotaStanding]:
        self._check_reachable()
        return await super().look(subject)

    async def reserve(self, charge: QuotaCharge, subject: QuotaSubject) -> list[QuotaStanding]:
        self._check_reachable()
        standing = await super().reserve(charge, subject)
        self.num_reserved += 1
        return standing

    async def release_many(self, charges: Sequence[QuotaCharge]) -> None:
        self._check_reachable()
        await super().release_many(charges)

    def _check_reachable(self) -> None:
        if not self.is_reachable:
            raise QuotaUnavailableError("gone")


@dataclass(kw_only=True)
class Limited:
    """Gateways of a tenant with limits, over one scheduler and one state of the quotas."""

    gateways: list[GatewayRig]
    quota: FlakyQuota
    scheduler: MemoryScheduler
    clock: SteppedClock

    @property
    def gateway(self) -> GatewayRig:
        return self.gateways[0]

    def create(self, request_id: str = "", *, number: int = 0, max_output_tokens: int = 10) -> Any:
        gateway = self.gateways[number % len(self.gateways)]
        return gateway.stub.CreateGeneration(
            create_request(request_id, max_output_tokens=max_output_tokens), metadata=gateway.auth
        )

    async def used(self) -> list[int]:
        """By the tenant: requests, tokens, live ones, tokens of day and month."""
        under_test = QuotaUnderTest(quota=self.quota, other=self.quota, clock=self.clock)
        return list((await under_test.used(tenant_id=TenantId(TENANT))).values())[:5]


@asynccontextmanager
async def limited(directory: Path, limits: QuotaLimits, *, num_gateways: int = 1) -> AsyncIterator[Limited]:
    clock, scheduler = SteppedClock(START), MemoryScheduler()
    quota = FlakyQuota(clock)
    assert await quota.begin_rebuild()
    await quota.mark_ready()
    await add_tenant(scheduler.store, TENANT, limits=limits)
    async with AsyncExitStack() as stack:
        gateways = [
            await stack.enter_async_context(running_gateway(directory, scheduler=scheduler, quota=quota))
            for _ in range(num_gateways)
        ]
        yield Limited(gateways=gateways, quota=quota, scheduler=scheduler, clock=clock)


def create_request(request_id: str = "", *, max_output_tokens: int = 10) -> inference_pb2.CreateGenerationRequest:
    sampling = types_pb2.Sampling(max_output_tokens=max_output_tokens)
    spec = types_pb2.GenerationSpec(model="simulated", prompt="ab", sampling=sampling)
    return inference_pb2.CreateGenerationRequest(request_id=request_id, spec=spec)


async def failure_of(call: Any) -> RpcFailure:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return parse_rpc_error(caught.value)


def ratelimits(metadata: Any) -> dict[str, str]:
    return {
        name.removeprefix("x-ratelimit-"): value for name, value in metadata or () if name.startswith("x-ratelimit-")
    }


@pytest.mark.parametrize("kind", QuotaKind)
async def test_two_gateways_together_admit_exactly_the_limit(tmp_path: Path, kind: QuotaKind) -> None:
    cost = 1 if kind in (QuotaKind.REQUESTS_PER_MINUTE, QuotaKind.MAX_CONCURRENT) else COST
    async with limited(tmp_path, QuotaLimits(**{kind.value: 5 * cost}), num_gateways=2) as two:
        calls = [two.create(number=number) for number in range(20)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        refusals = [parse_rpc_error(each) for each in outcomes if isinstance(each, grpc.aio.AioRpcError)]
        assert len(refusals) == 15
        assert {(failure.code, failure.reason) for failure in refusals} == {
            (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.QUOTA_EXCEEDED)
        }
        assert {failure.quota_subject for failure in refusals} == {f"tenant:{TENANT}:{kind.value}"}
        assert len(two.scheduler.submits) == 5
        assert await two.used() == [5, 5 * COST, 5, 5 * COST, 5 * COST]


async def test_a_refusal_says_when_it_can_fit_and_what_the_limits_are(tmp_path: Path) -> None:
    async with limited(tmp_path, QuotaLimits(requests_per_minute=1, tokens_per_minute=500)) as one:
        await one.create()
        one.clock.advance(timedelta(seconds=10))
        call = one.create()
        failure = await failure_of(call)
        assert failure.retry_after == timedelta(seconds=50.75)
        assert ratelimits(await call.trailing_metadata()) == {
            "limit-requests-per-minute": "1",
            "remaining-requests-per-minute": "0",
            "reset-requests-per-minute": "51",
            "limit-tokens-per-minute": "500",
            "remaining-tokens-per-minute": "487",
            "reset-tokens-per-minute": "51",
        }
        assert "x-generation-id" not in dict(await call.initial_metadata())
        one.clock.advance(failure.retry_after)
        await one.create()


async def test_what_is_left_is_told_before_and_after_the_reservation(tmp_path: Path) -> None:
    limits = QuotaLimits(max_concurrent=3, tokens_per_day=100, tokens_per_month=1000)
    async with limited(tmp_path, limits) as one:
        call = one.create()
        before, after = ratelimits(await call.initial_metadata()), ratelimits(await call.trailing_metadata())
        await call
        names = ["concurrent", "tokens-per-day", "tokens-per-month"]
        assert [before[f"remaining-{name}"] for name in names] == ["3", "100", "1000"]
        assert [after[f"remaining-{name}"] for name in names] == ["2", "87", "987"]
        assert [after[f"limit-{name}"] for name in names] == ["3", "100", "1000"]
        assert [after[f"reset-{name}"] for name in names] == ["0", "43200", "129600"]
        call = one.gateway.stub.Generate(
            inference_pb2.GenerateRequest(spec=create_request().spec), metadata=one.gateway.auth
        )
        assert ratelimits(await call.initial_metadata())["remaining-concurrent"] == "2"
        accepted = (await call.read()).accepted
        await one.scheduler.grant(GenerationId(accepted.generation_id))
        await one.scheduler.finish(GenerationId(accepted.generation_id))
        while await call.read() is not grpc.aio.EOF:
            pass
        assert ratelimits(await call.trailing_metadata())["remaining-concurrent"] == "1"


async def test_a_request_that_no_waiting_makes_fit_is_a_bad_field(tmp_path: Path) -> None:
    async with limited(tmp_path, QuotaLimits(tokens_per_minute=12, tokens_per_day=100)) as one:
        failure = await failure_of(one.create())
        assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, Reason.INVALID_FIELD)
        (violation,) = failure.violations
        assert violation.field == "spec.sampling.max_output_tokens"
        assert "tokens_per_minute is 12" in violation.description
        assert one.quota.num_reserved == 0
        await one.create(max_output_tokens=9)


async def test_at_its_limits_a_tenant_comes_back_to_its_own_stream_uncharged(tmp_path: Path) -> None:
    for limits in (QuotaLimits(max_concurrent=1), QuotaLimits(tokens_per_day=COST), QuotaLimits(requests_per_minute=1)):
        async with limited(tmp_path, limits) as one:
            first = (await one.create("mine")).accepted
            used = await one.used()
            again = (await one.create("mine")).accepted
            assert (again.generation_id, again.created) == (first.generation_id, False)
            failure = await failure_of(one.create("another"))
            assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await one.used() == used
            assert one.quota.num_reserved == 1


async def test_below_its_limits_attaching_leaves_no_charge_behind(tmp_path: Path) -> None:
    async with limited(tmp_path, QuotaLimits(max_concurrent=9)) as one:
        await one.create("mine")
        used = await one.used()
        await one.create("mine")
        assert await one.used() == used == [1, COST, 1, COST, COST]


async def test_without_the_quotas_server_known_requests_attach_and_new_ones_are_told_to_retry(tmp_path: Path) -> None:
    for limits in (QuotaLimits(max_concurrent=9), QuotaLimits()):
        async with limited(tmp_path, limits) as one:
            first = (await one.create("mine")).accepted
            one.quota.is_reachable = False
            assert (await one.create("mine")).accepted.generation_id == first.generation_id
            failure = await failure_of(one.create("another"))
            assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.STORE_UNAVAILABLE)
            assert failure.retry_after is not None


async def test_emptied_quotas_refuse_retryably_until_they_are_rebuilt(tmp_path: Path) -> None:
    async with limited(tmp_path, QuotaLimits()) as one:
        one.quota.lose_all()
        failure = await failure_of(one.create())
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.STORE_UNAVAILABLE)
        assert await one.quota.begin_rebuild()
        await one.quota.mark_ready()
        await one.create()


async def test_a_limit_lowered_below_a_known_request_does_not_keep_it_away(tmp_path: Path) -> None:
    async with limited(tmp_path, QuotaLimits(tokens_per_minute=50), num_gateways=2) as two:
        first = (await two.create("mine")).accepted
        lowered = TenantChange(limits=QuotaLimits(tokens_per_minute=5))
        await two.scheduler.store.update_tenant(TenantId(TENANT), lowered, actor=ACTOR)
        assert (await failure_of(two.create(number=1))).code is grpc.StatusCode.INVALID_ARGUMENT
        assert (await two.create("mine", number=1)).accepted.generation_id == first.generation_id
        assert two.quota.num_reserved == 1


async def test_what_the_scheduler_refuses_is_given_back(tmp_path: Path) -> None:
    async with limited(tmp_path, QuotaLimits(max_concurrent=1)) as one:
        one.scheduler.refusal = UnavailableError("gone")
        await failure_of(one.create())
        assert await one.used() == [0] * 5
        one.scheduler.refusal = None
        await one.create()
