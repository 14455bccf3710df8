from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from inference.internal.v1 import scheduler_pb2
from inference.v1 import inference_pb2, types_pb2
from service_kit.errors import QuotaExceededError, Reason, UnavailableError
from service_kit.ids import GenerationId
from service_kit.rpc_status import RpcFailure, parse_rpc_error
from service_kit.sampling import SamplingParams
from service_kit.sampling_codec import decode_sampling
from state_store.quota.port import PermissiveQuota, QuotaCharge, QuotaStanding, QuotaSubject
from tests.support.gateway import GatewayRig, MemoryScheduler, running_gateway

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class CountingQuota(PermissiveQuota):
    """Reservations by generation id; refuses when told to."""

    def __init__(self) -> None:
        self.is_full = False
        self.reserved: list[QuotaCharge] = []
        self.released: list[GenerationId] = []

    async def reserve(self, charge: QuotaCharge, subject: QuotaSubject) -> list[QuotaStanding]:
        if self.is_full:
            raise QuotaExceededError("too many requests", subject="tenant:tenant:concurrency")
        self.reserved.append(charge)
        return []

    async def release_many(self, charges: Sequence[QuotaCharge]) -> None:
        self.released += [charge.generation_id for charge in charges]


def create_request(request_id: str = "r1", **fields: Any) -> inference_pb2.CreateGenerationRequest:
    spec = types_pb2.GenerationSpec(model="simulated", prompt="ab")
    return inference_pb2.CreateGenerationRequest(request_id=request_id, spec=spec, **fields)


async def failure_of(call: Any) -> RpcFailure:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return parse_rpc_error(caught.value)


async def test_a_scheduler_that_is_away_is_passed_over(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, extra_schedulers=["127.0.0.1:1", "127.0.0.1:2"]) as gateway:
        for request_id in ("r1", "r2"):
            answer = await gateway.stub.CreateGeneration(create_request(request_id), metadata=gateway.auth)
            assert answer.accepted.created


async def test_without_a_reachable_scheduler_the_request_is_refused_retryably(tmp_path: Path) -> None:
    scheduler = MemoryScheduler()
    scheduler.refusal = UnavailableError("gone")
    async with running_gateway(tmp_path, scheduler=scheduler) as gateway:
        failure = await failure_of(gateway.stub.CreateGeneration(create_request(), metadata=gateway.auth))
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.NO_SCHEDULER)
    assert failure.retry_after is not None


async def test_a_scheduler_hears_whether_anybody_can_know_the_request_id_yet(tmp_path: Path) -> None:
    scheduler = MemoryScheduler()
    scheduler.refusal = UnavailableError("gone")
    async with running_gateway(tmp_path, scheduler=scheduler, num_scheduler_names=2) as gateway:
        await failure_of(gateway.stub.CreateGeneration(create_request(""), metadata=gateway.auth))
        await failure_of(gateway.stub.CreateGeneration(create_request("mine"), metadata=gateway.auth))
    # The second scheduler is asked for what the first may have committed.
    assert [each.is_new for each in scheduler.submits] == [True, False, False, False]


async def test_a_full_queue_is_everybodys_and_no_other_scheduler_is_asked(tmp_path: Path) -> None:
    scheduler = MemoryScheduler()
    scheduler.refusal = UnavailableError("full", reason=Reason.QUEUE_FULL, retry_after=timedelta(seconds=3))
    async with running_gateway(tmp_path, scheduler=scheduler, num_scheduler_names=2) as gateway:
        failure = await failure_of(gateway.stub.CreateGeneration(create_request(), metadata=gateway.auth))
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.QUEUE_FULL)
    assert failure.retry_after == timedelta(seconds=3)
    assert len(scheduler.submits) == 1


async def test_a_full_queue_is_remembered_and_refuses_all_but_known_requests(gateway: GatewayRig) -> None:
    stub, scheduler = gateway.stub, gateway.scheduler
    known = (await stub.CreateGeneration(create_request("known"), metadata=gateway.auth)).accepted
    scheduler.refusal = UnavailableError(
        "full", reason=Reason.QUEUE_FULL, retry_after=timedelta(minutes=1), metadata={"bound": "requests"}
    )
    await failure_of(stub.CreateGeneration(create_request("r1"), metadata=gateway.auth))
    scheduler.refusal = None
    num_submits = len(scheduler.submits)
    failure = await failure_of(stub.CreateGeneration(create_request("r2"), metadata=gateway.auth))
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.QUEUE_FULL)
    assert failure.retry_after is not None
    assert timedelta(0) < failure.retry_after <= timedelta(seconds=2)
    assert len(scheduler.submits) == num_submits
    again = (await stub.CreateGeneration(create_request("known"), metadata=gateway.auth)).accepted
    assert again.generation_id == known.generation_id
    other_class = create_request("r3")
    other_class.spec.priority_class = types_pb2.PRIORITY_CLASS_BATCH
    assert (await stub.CreateGeneration(other_class, metadata=gateway.auth)).accepted.created


async def test_who_takes_the_last_place_lets_the_next_be_refused_without_asking(gateway: GatewayRig) -> None:
    stub, scheduler = gateway.stub, gateway.scheduler
    scheduler.places = scheduler_pb2.QueuePlaces(queue=7, tenant=0, retry_after=Duration(seconds=60))
    assert (await stub.CreateGeneration(create_request("r1"), metadata=gateway.auth)).accepted.created
    failure = await failure_of(stub.CreateGeneration(create_request("r2"), metadata=gateway.auth))
    assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.TENANT_QUEUE_FULL)
    assert failure.retry_after is not None
    assert timedelta(0) < failure.retry_after <= timedelta(seconds=2)
    assert [each.request_id for each in scheduler.submits] == ["r1"]


async def test_a_prompt_too_long_for_the_queue_is_refused_alone(gateway: GatewayRig) -> None:
    stub, scheduler = gateway.stub, gateway.scheduler
    scheduler.refusal = UnavailableError("full", reason=Reason.QUEUE_FULL, metadata={"bound": "prompt_tokens"})
    await failure_of(stub.CreateGeneration(create_request("r1"), metadata=gateway.auth))
    scheduler.refusal = None
    assert (await stub.CreateGeneration(create_request("r2"), metadata=gateway.auth)).accepted.created


async def test_a_tenants_full_queue_reaches_the_caller_with_its_details(tmp_path: Path) -> None:
    scheduler = MemoryScheduler()
    scheduler.refusal = QuotaExceededError("full", subject="tenant:tenant:queue", reason=Reason.TENANT_QUEUE_FULL)
    async with running_gateway(tmp_path, scheduler=scheduler) as gateway:
        failure = await failure_of(gateway.stub.CreateGeneration(create_request(), metadata=gateway.auth))
    assert (failure.code, failure.quota_subject) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "tenant:tenant:queue")


async def test_repeating_a_request_attaches_and_gives_its_reservation_back(tmp_path: Path) -> None:
    quota = CountingQuota()
    async with running_gateway(tmp_path, quota=quota) as gateway:
        first = await gateway.stub.CreateGeneration(create_request(), metadata=gateway.auth)
        second = await gateway.stub.CreateGeneration(create_request(), metadata=gateway.auth)
    assert (first.accepted.created, second.accepted.created) == (True, False)
    assert first.accepted.generation_id == second.accepted.generation_id
    assert [charge.prompt_tokens for charge in quota.reserved] == [3, 3]
    assert quota.released == [quota.reserved[1].generation_id]


async def test_a_tenant_at_its_limit_still_attaches_and_starts_nothing_new(tmp_path: Path) -> None:
    quota = CountingQuota()
    async with running_gateway(tmp_path, quota=quota) as gateway:
        first = await gateway.stub.CreateGeneration(create_request(), metadata=gateway.auth)
        quota.is_full = True
        again = await gateway.stub.CreateGeneration(create_request(), metadata=gateway.auth)
        assert again.accepted.generation_id == first.accepted.generation_id
        failure = await failure_of(gateway.stub.CreateGeneration(create_request("r2"), metadata=gateway.auth))
    assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.QUOTA_EXCEEDED)


async def test_ids_are_minted_and_sent_before_the_answer_even_of_a_refusal(gateway: GatewayRig) -> None:
    call = gateway.stub.CreateGeneration(create_request(""), metadata=gateway.auth)
    headers = dict(await call.initial_metadata())
    accepted = (await call).accepted
    assert headers["x-generation-id"] == accepted.generation_id
    assert headers["x-request-id"] == accepted.request_id
    bad = inference_pb2.CreateGenerationRequest(request_id="r9")
    call = gateway.stub.CreateGeneration(bad, metadata=gateway.auth)
    assert dict(await call.initial_metadata())["x-request-id"] == "r9"
    await failure_of(call)


async def test_every_sampling_field_reaches_the_scheduler_with_the_value_of_its_32_bits(gateway: GatewayRig) -> None:
    sampling = types_pb2.Sampling(
        temperature=0.8,
        top_k=4,
        top_p=0.9,
        seed=5,
        max_output_tokens=9,
        stop=["x"],
        stop_token_ids=[6],
        ignore_eos=True,
        min_output_tokens=3,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=-0.3,
        frequency_penalty=0.7,
        logit_bias=[types_pb2.LogitBias(token_id=7, bias=0.1), types_pb2.LogitBias(token_id=0, bias=-100)],
        include_stop=True,
        logprobs=0,
    )
    request = inference_pb2.CreateGenerationRequest(
        request_id="r1", spec=types_pb2.GenerationSpec(model="simulated", prompt="ab", sampling=sampling)
    )
    await gateway.stub.CreateGeneration(request, metadata=gateway.auth)
    assert decode_sampling(gateway.scheduler.submits[-1].sampling, field="sampling") == SamplingParams(
        temperature=0.800000011920929,
        top_k=4,
        top_p=0.8999999761581421,
        seed=5,
        max_output_tokens=9,
        stop=("x",),
        stop_token_ids=(6,),
        ignore_eos=True,
        min_output_tokens=3,
        min_p=0.05000000074505806,
        repetition_penalty=1.100000023841858,
        presence_penalty=-0.30000001192092896,
        frequency_penalty=0.699999988079071,
        logit_bias=((0, -100.0), (7, 0.10000000149011612)),
        include_stop=True,
        logprobs=0,
    )


async def test_the_longest_output_is_what_the_context_leaves_even_with_a_shortest_one(gateway: GatewayRig) -> None:
    request = create_request()
    request.spec.sampling.min_output_tokens = 61
    await gateway.stub.CreateGeneration(request, metadata=gateway.auth)
    sampling = gateway.scheduler.submits[-1].sampling
    assert (sampling.min_output_tokens, sampling.max_output_tokens, sampling.repetition_penalty) == (61, 61, 1.0)
    assert not sampling.HasField("logprobs")


async def test_times_seed_and_defaults_reach_the_scheduler_as_meant(gateway: GatewayRig) -> None:
    await gateway.stub.CreateGeneration(create_request(), metadata=gateway.auth)
    submitted = gateway.scheduler.submits[-1]
    assert not submitted.HasField("grace")
    assert not submitted.HasField("deadline")
    assert submitted.queue_timeout.ToTimedelta() == timedelta(minutes=10)
    assert submitted.sampling.max_output_tokens == 64 - 3
    assert (submitted.has_seed, submitted.sampling.temperature, submitted.sampling.top_p) == (False, 1.0, 1.0)
    assert len(submitted.request_hash) == 32
    call = gateway.stub.Generate(
        inference_pb2.GenerateRequest(
            spec=types_pb2.GenerationSpec(model="simulated", prompt="ab", sampling=types_pb2.Sampling(seed=0)),
            delivery=types_pb2.Delivery(deadline=Duration(seconds=5)),
        ),
        metadata=(*gateway.auth, ("traceparent", TRACEPARENT)),
    )
    await call.read()
    call.cancel()
    submitted = gateway.scheduler.submits[-1]
    assert submitted.grace.ToTimedelta() == timedelta(seconds=30)
    assert submitted.deadline.ToTimedelta() == timedelta(seconds=5)
    assert submitted.has_seed
    assert submitted.traceparent.startswith(TRACEPARENT[:36])
