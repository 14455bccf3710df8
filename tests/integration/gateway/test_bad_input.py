import base64
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from gpu_worker.artifacts.simulated_model import VOCAB_SIZE
from inference.v1 import inference_pb2, types_pb2
from service_kit.ids import KeyId
from service_kit.rpc_status import RpcFailure, parse_rpc_error
from state_store.model import PriorityClass
from tests.support.gateway import GatewayRig, add_key, bearer

CONTEXT = 64
ANY_UUID = "01900000-0000-7000-8000-000000000000"
NAN = float("nan")
INFINITY = float("inf")


def spec(**changes: Any) -> types_pb2.GenerationSpec:
    if not {"prompt", "chat", "token_ids"} & set(changes):
        changes["prompt"] = "ab"
    return types_pb2.GenerationSpec(**{"model": "simulated", **changes})


def sampling(**fields: Any) -> types_pb2.GenerationSpec:
    return spec(sampling=types_pb2.Sampling(**fields))


def biased(*biases: tuple[int, float]) -> types_pb2.GenerationSpec:
    return sampling(logit_bias=[types_pb2.LogitBias(token_id=token_id, bias=bias) for token_id, bias in biases])


def chat(*messages: tuple[str, str]) -> types_pb2.Chat:
    return types_pb2.Chat(messages=[types_pb2.ChatMessage(role=role, content=text) for role, text in messages])


BAD_SPECS: list[tuple[str, types_pb2.GenerationSpec, str]] = [
    ("no model", spec(model=""), "spec.model"),
    ("no input", types_pb2.GenerationSpec(model="simulated"), "spec.input"),
    ("empty prompt", spec(prompt=""), "spec.prompt"),
    ("empty chat", spec(chat=chat()), "spec.chat.messages"),
    ("no role", spec(chat=chat(("user", "a"), ("", "b"))), "spec.chat.messages[1].role"),
    ("no token ids", spec(token_ids=types_pb2.TokenIds()), "spec.token_ids.ids"),
    ("unknown token id", spec(token_ids=types_pb2.TokenIds(ids=[1, VOCAB_SIZE])), "spec.token_ids.ids"),
    ("full context", spec(prompt="a" * CONTEXT), "spec.prompt"),
    ("full context of ids", spec(token_ids=types_pb2.TokenIds(ids=[1] * CONTEXT)), "spec.token_ids"),
    ("long chat", spec(chat=chat(("user", "a" * CONTEXT))), "spec.chat"),
    ("many messages", spec(chat=chat(*[("u", "")] * (CONTEXT + 1))), "spec.chat.messages"),
    ("10 MB prompt", spec(prompt="a" * 10_000_000), "spec.prompt"),
    ("10 MB chat", spec(chat=chat(("user", "a" * 10_000_000))), "spec.chat"),
    ("prompt and output", sampling(max_output_tokens=CONTEXT - 2), "spec.sampling.max_output_tokens"),
    ("no output", sampling(max_output_tokens=0), "spec.sampling.max_output_tokens"),
    ("huge output", sampling(max_output_tokens=2**32 - 1), "spec.sampling.max_output_tokens"),
    ("temperature below", sampling(temperature=-1), "spec.sampling.temperature"),
    ("temperature above", sampling(temperature=101), "spec.sampling.temperature"),
    ("temperature NaN", sampling(temperature=NAN), "spec.sampling.temperature"),
    ("top_p zero", sampling(top_p=0), "spec.sampling.top_p"),
    ("top_p above", sampling(top_p=1.5), "spec.sampling.top_p"),
    ("top_p NaN", sampling(top_p=NAN), "spec.sampling.top_p"),
    ("top_k", sampling(top_k=2**32 - 1), "spec.sampling.top_k"),
    ("seed", sampling(seed=2**63), "spec.sampling.seed"),
    ("empty stop", sampling(stop=[""]), "spec.sampling.stop"),
    ("NUL stop", sampling(stop=["a\x00"]), "spec.sampling.stop"),
    ("long stop", sampling(stop=["a" * 257]), "spec.sampling.stop"),
    ("many stops", sampling(stop=["a"] * 17), "spec.sampling.stop"),
    ("unknown stop id", sampling(stop_token_ids=[1, VOCAB_SIZE]), "spec.sampling.stop_token_ids[1]"),
    ("many stop ids", sampling(stop_token_ids=[1] * 65), "spec.sampling.stop_token_ids"),
    ("min above max", sampling(min_output_tokens=3, max_output_tokens=2), "spec.sampling.min_output_tokens"),
    ("prompt and min", sampling(min_output_tokens=CONTEXT - 2), "spec.sampling.min_output_tokens"),
    ("huge min", sampling(min_output_tokens=2**32 - 1), "spec.sampling.min_output_tokens"),
    ("min_p below", sampling(min_p=-0.1), "spec.sampling.min_p"),
    ("min_p above", sampling(min_p=1.1), "spec.sampling.min_p"),
    ("min_p NaN", sampling(min_p=NAN), "spec.sampling.min_p"),
    ("repetition zero", sampling(repetition_penalty=0), "spec.sampling.repetition_penalty"),
    ("repetition above", sampling(repetition_penalty=10.1), "spec.sampling.repetition_penalty"),
    ("repetition NaN", sampling(repetition_penalty=NAN), "spec.sampling.repetition_penalty"),
    ("presence below", sampling(presence_penalty=-2.1), "spec.sampling.presence_penalty"),
    ("presence infinite", sampling(presence_penalty=INFINITY), "spec.sampling.presence_penalty"),
    ("frequency above", sampling(frequency_penalty=2.1), "spec.sampling.frequency_penalty"),
    ("frequency infinite", sampling(frequency_penalty=-INFINITY), "spec.sampling.frequency_penalty"),
    ("bias above", biased((1, 0), (2, 100.1)), "spec.sampling.logit_bias[1].bias"),
    ("bias below", biased((1, -101)), "spec.sampling.logit_bias[0].bias"),
    ("bias NaN", biased((1, 0), (2, 0), (3, NAN)), "spec.sampling.logit_bias[2].bias"),
    ("bias infinite", biased((1, -INFINITY)), "spec.sampling.logit_bias[0].bias"),
    ("bias of unknown token", biased((1, 0), (VOCAB_SIZE, 0)), "spec.sampling.logit_bias[1].token_id"),
    ("two biases of one token", biased((5, 1), (6, 1), (5, 1)), "spec.sampling.logit_bias[2].token_id"),
    ("many biases", biased(*[(1, 0)] * 1025), "spec.sampling.logit_bias"),
    ("logprobs", sampling(logprobs=21), "spec.sampling.logprobs"),
    ("class", spec(priority_class=9), "spec.priority_class"),
]


async def failure_of(call: Any) -> RpcFailure:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call.read() if hasattr(call, "read") else call)
    return parse_rpc_error(caught.value)


def assert_names(failure: RpcFailure, field: str) -> None:
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT, failure
    assert [violation.field for violation in failure.violations] == [field]


@pytest.mark.parametrize(("bad", "field"), [case[1:] for case in BAD_SPECS], ids=[case[0] for case in BAD_SPECS])
async def test_a_bad_spec_is_refused_by_field_and_nothing_is_submitted(
    gateway: GatewayRig, bad: types_pb2.GenerationSpec, field: str
) -> None:
    request = inference_pb2.GenerateRequest(spec=bad)
    assert_names(await failure_of(gateway.stub.Generate(request, metadata=gateway.auth, timeout=20)), field)
    create = inference_pb2.CreateGenerationRequest(spec=bad)
    assert_names(await failure_of(gateway.stub.CreateGeneration(create, metadata=gateway.auth, timeout=20)), field)
    assert gateway.scheduler.submits == []


def duration(seconds: int = 0, nanos: int = 0) -> Duration:
    return Duration(seconds=seconds, nanos=nanos)


@pytest.mark.parametrize(
    ("delivery", "field"),
    [
        (types_pb2.Delivery(grace=duration(-1)), "delivery.grace"),
        (types_pb2.Delivery(grace=duration(0, -1)), "delivery.grace"),
        (types_pb2.Delivery(grace=duration(1, -1)), "delivery.grace"),
        (types_pb2.Delivery(grace=duration(2**62)), "delivery.grace"),
        (types_pb2.Delivery(queue_timeout=duration()), "delivery.queue_timeout"),
        (types_pb2.Delivery(queue_timeout=duration(86_401)), "delivery.queue_timeout"),
        (types_pb2.Delivery(queue_timeout=duration(1, 2_000_000_000)), "delivery.queue_timeout"),
        (types_pb2.Delivery(deadline=duration(-5)), "delivery.deadline"),
        (types_pb2.Delivery(deadline=duration(86_400, 1)), "delivery.deadline"),
    ],
)
async def test_a_bad_duration_is_refused_by_field(
    gateway: GatewayRig, delivery: types_pb2.Delivery, field: str
) -> None:
    request = inference_pb2.GenerateRequest(spec=spec(), delivery=delivery)
    assert_names(await failure_of(gateway.stub.Generate(request, metadata=gateway.auth, timeout=20)), field)


@pytest.mark.parametrize("request_id", ["a b", "ä", "a/b", "x" * 129, "a\n", "\x00"])
async def test_a_malformed_request_id_is_refused(gateway: GatewayRig, request_id: str) -> None:
    request = inference_pb2.GenerateRequest(request_id=request_id, spec=spec())
    assert_names(await failure_of(gateway.stub.Generate(request, metadata=gateway.auth, timeout=20)), "request_id")


@pytest.mark.parametrize(
    ("request_id", "cursor", "field"),
    [
        ("r", types_pb2.Cursor(sequence_number=3), "cursor.chain"),
        ("r", types_pb2.Cursor(chain=3), "cursor.sequence_number"),
        ("r", types_pb2.Cursor(sequence_number=2**63, chain=1), "cursor.sequence_number"),
        ("", types_pb2.Cursor(sequence_number=3, chain=1), "request_id"),
    ],
)
async def test_a_bad_cursor_is_refused(
    gateway: GatewayRig, request_id: str, cursor: types_pb2.Cursor, field: str
) -> None:
    request = inference_pb2.GenerateRequest(request_id=request_id, spec=spec(), cursor=cursor)
    assert_names(await failure_of(gateway.stub.Generate(request, metadata=gateway.auth, timeout=20)), field)


@pytest.mark.parametrize(
    ("ref", "field"),
    [
        (inference_pb2.GenerationRef(), "generation.id"),
        (inference_pb2.GenerationRef(generation_id="nonsense"), "generation.generation_id"),
        (inference_pb2.GenerationRef(generation_id=""), "generation.generation_id"),
        (inference_pb2.GenerationRef(request_id="a b"), "generation.request_id"),
        (inference_pb2.GenerationRef(request_id=""), "generation.request_id"),
    ],
)
async def test_a_bad_reference_is_refused_by_every_call_that_takes_one(
    gateway: GatewayRig, ref: inference_pb2.GenerationRef, field: str
) -> None:
    stub, auth = gateway.stub, gateway.auth
    for call in (
        stub.GetGeneration(inference_pb2.GetGenerationRequest(generation=ref), metadata=auth),
        stub.CancelGeneration(inference_pb2.CancelGenerationRequest(generation=ref), metadata=auth),
        stub.StreamGeneration(inference_pb2.StreamGenerationRequest(generation=ref), metadata=auth),
    ):
        assert_names(await failure_of(call), field)


@pytest.mark.parametrize("method", ["Generate", "GetGeneration"])
@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x01\xff", b"\x0a\x01\x00\xff"])
async def test_bytes_that_are_no_message_are_the_callers_mistake(gateway: GatewayRig, method: str, data: bytes) -> None:
    """A broken tag, a text that is not UTF-8, and a message cut short."""
    make = gateway.channel.unary_stream if method == "Generate" else gateway.channel.unary_unary
    call = make(f"/inference.v1.InferenceService/{method}", None, None)(data, metadata=gateway.auth, timeout=20)
    failure = await failure_of(call)
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.reason == "INVALID_FIELD"


async def test_an_unknown_model_is_not_found(gateway: GatewayRig) -> None:
    for call in (
        gateway.stub.Generate(inference_pb2.GenerateRequest(spec=spec(model="other")), metadata=gateway.auth),
        gateway.stub.Tokenize(inference_pb2.TokenizeRequest(model="other", prompt="a"), metadata=gateway.auth),
    ):
        failure = await failure_of(call)
        assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")


def forged_token(text: str) -> str:
    """A page token in the right wrapping."""
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (inference_pb2.ListGenerationsRequest(page_size=1001), "page_size"),
        (inference_pb2.ListGenerationsRequest(page_token="nonsense"), "page_token"),
        (inference_pb2.ListGenerationsRequest(page_token="W10"), "page_token"),
        (inference_pb2.ListGenerationsRequest(page_token="é"), "page_token"),
        (inference_pb2.ListGenerationsRequest(page_token=forged_token('[1, "no generation id", []]')), "page_token"),
        (inference_pb2.ListGenerationsRequest(page_token=forged_token(r'[1, "\u0000", []]')), "page_token"),
        (inference_pb2.ListGenerationsRequest(page_token=forged_token(f'[1, "{{{ANY_UUID}}}", []]')), "page_token"),
        (inference_pb2.ListGenerationsRequest(page_token=forged_token("[" * 100_000)), "page_token"),
        (inference_pb2.ListGenerationsRequest(states=[0]), "states"),
        (inference_pb2.ListGenerationsRequest(states=[99]), "states"),
    ],
)
async def test_a_bad_list_request_is_refused(
    gateway: GatewayRig, request_: inference_pb2.ListGenerationsRequest, field: str
) -> None:
    assert_names(await failure_of(gateway.stub.ListGenerations(request_, metadata=gateway.auth)), field)


async def test_a_reused_request_id_with_other_arguments_already_exists(gateway: GatewayRig) -> None:
    first = inference_pb2.CreateGenerationRequest(request_id="same", spec=spec())
    await gateway.stub.CreateGeneration(first, metadata=gateway.auth)
    second = inference_pb2.CreateGenerationRequest(request_id="same", spec=sampling(temperature=0.5))
    failure = await failure_of(gateway.stub.CreateGeneration(second, metadata=gateway.auth))
    assert (failure.code, failure.reason) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_REUSED")


async def test_a_class_above_the_tenants_highest_is_refused_and_the_default_stays_within_it(
    gateway: GatewayRig,
) -> None:
    key = await add_key(gateway.scheduler.store, "batch-only", max_class=PriorityClass.BATCH)
    refused = spec(priority_class=types_pb2.PRIORITY_CLASS_STANDARD)
    request = inference_pb2.CreateGenerationRequest(spec=refused)
    assert_names(await failure_of(gateway.stub.CreateGeneration(request, metadata=bearer(key))), "spec.priority_class")
    await gateway.stub.CreateGeneration(inference_pb2.CreateGenerationRequest(spec=spec()), metadata=bearer(key))
    assert gateway.scheduler.submits[-1].priority == PriorityClass.BATCH.rank


ALL_CALLS: list[tuple[str, Callable[[], Any]]] = [
    ("Generate", inference_pb2.GenerateRequest),
    ("CreateGeneration", inference_pb2.CreateGenerationRequest),
    ("StreamGeneration", inference_pb2.StreamGenerationRequest),
    ("GetGeneration", inference_pb2.GetGenerationRequest),
    ("ListGenerations", inference_pb2.ListGenerationsRequest),
    ("CancelGeneration", inference_pb2.CancelGenerationRequest),
    ("ListModels", inference_pb2.ListModelsRequest),
    ("Tokenize", inference_pb2.TokenizeRequest),
]


@pytest.mark.parametrize(("name", "request_type"), ALL_CALLS, ids=[name for name, _ in ALL_CALLS])
async def test_every_call_needs_a_valid_key(gateway: GatewayRig, name: str, request_type: Callable[[], Any]) -> None:
    store = gateway.scheduler.store
    expired = await add_key(store, "late", expires_at=datetime.now(UTC) - timedelta(seconds=1))
    revoked = await add_key(store, "gone")
    await store.revoke_key(KeyId(f"key-{revoked.split('-')[2]}"), actor="operator:test")
    other_secret = "-".join([*gateway.key.split("-")[:3], "x" * 43])
    wrong: list[tuple[tuple[str, str], ...]] = [
        (),
        (("authorization", "nonsense"),),
        (("authorization", f"Basic {gateway.key}"),),
        bearer(""),
        bearer("sk-sluice-unknown000000-" + "x" * 43),
        bearer(other_secret),
        bearer(expired),
        bearer(revoked),
    ]
    for metadata in wrong:
        failure = await failure_of(getattr(gateway.stub, name)(request_type(), metadata=metadata, timeout=20))
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAUTHENTICATED, "INVALID_API_KEY")


async def test_another_tenants_generation_is_not_found_by_either_id(gateway: GatewayRig) -> None:
    mine = await gateway.stub.CreateGeneration(
        inference_pb2.CreateGenerationRequest(request_id="mine", spec=spec()), metadata=gateway.auth
    )
    other = bearer(await add_key(gateway.scheduler.store, "other"))
    for ref in (
        inference_pb2.GenerationRef(generation_id=mine.accepted.generation_id),
        inference_pb2.GenerationRef(request_id="mine"),
        inference_pb2.GenerationRef(generation_id="0190b5a0-0000-7000-8000-000000000000"),
    ):
        for call in (
            gateway.stub.GetGeneration(inference_pb2.GetGenerationRequest(generation=ref), metadata=other),
            gateway.stub.CancelGeneration(inference_pb2.CancelGenerationRequest(generation=ref), metadata=other),
            gateway.stub.StreamGeneration(inference_pb2.StreamGenerationRequest(generation=ref), metadata=other),
        ):
            failure = await failure_of(call)
            assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "GENERATION_NOT_FOUND")
    listed = await gateway.stub.ListGenerations(inference_pb2.ListGenerationsRequest(), metadata=other)
    assert list(listed.generations) == []
