"""What a tenant can find out: its own generations, its own models, and nothing else."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from inference.v1 import inference_pb2, types_pb2
from service_kit.ids import KeyId
from service_kit.rpc_status import parse_rpc_error
from tests.support.gateway import GatewayRig, add_key, bearer, running_gateway
from tests.support.tenants import ACTOR, add_tenant
from tests.support.tiny_models import make_simulated_model

UNKNOWN_ID = "01900000-0000-7000-8000-000000000000"
_VARYING = frozenset({"x-generation-id", "x-request-id"})
"""Drawn anew for every call."""


async def everything_said(call: Any) -> tuple[Any, ...]:
    """Status, message, details and both kinds of metadata of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call.read() if hasattr(call, "read") else call)
    initial = sorted((key, "" if key in _VARYING else value) for key, value in await call.initial_metadata())
    trailing = sorted((key, value) for key, value in caught.value.trailing_metadata())
    return caught.value.code(), caught.value.details(), initial, trailing


def spec(model: str) -> types_pb2.GenerationSpec:
    return types_pb2.GenerationSpec(model=model, prompt="ab")


async def generation_of(gateway: GatewayRig, auth: Any) -> tuple[str, str]:
    """Generation and request id of a new one."""
    request = inference_pb2.CreateGenerationRequest(spec=spec("simulated"), request_id="theirs")
    created = await gateway.stub.CreateGeneration(request, metadata=auth, timeout=20)
    return created.accepted.generation_id, created.accepted.request_id


async def test_another_tenants_generation_is_not_there_exactly_as_one_that_never_was(gateway: GatewayRig) -> None:
    theirs, their_request = await generation_of(gateway, bearer(await add_key(gateway.scheduler.store, "other")))
    requests = (
        (inference_pb2.GetGenerationRequest, gateway.stub.GetGeneration),
        (
            inference_pb2.CancelGenerationRequest,
            gateway.stub.CancelGeneration,
        ),
        (inference_pb2.StreamGenerationRequest, gateway.stub.StreamGeneration),
    )
    for make, call in requests:
        said = [
            await everything_said(call(make(generation=reference), metadata=gateway.auth, timeout=20))
            for reference in (
                inference_pb2.GenerationRef(generation_id=theirs),
                inference_pb2.GenerationRef(generation_id=UNKNOWN_ID),
                inference_pb2.GenerationRef(request_id=their_request),
                inference_pb2.GenerationRef(request_id="nobodys"),
            )
        ]
        assert said[0][0] is grpc.StatusCode.NOT_FOUND
        assert said == [said[0]] * 4
    listed = await gateway.stub.ListGenerations(inference_pb2.ListGenerationsRequest(), metadata=gateway.auth)
    assert list(listed.generations) == []


async def test_a_model_that_is_not_allowed_is_not_there_exactly_as_one_that_never_was(tmp_path: Path) -> None:
    for name in ("open", "secret"):
        make_simulated_model(tmp_path / name, name=name, context_length=64)
    async with running_gateway(tmp_path) as gateway:
        await add_tenant(gateway.scheduler.store, "narrow", allowed_models=("open", "not-here-yet"))
        narrow = bearer(await add_key(gateway.scheduler.store, "narrow"))
        for call in (
            lambda model: gateway.stub.Generate(
                inference_pb2.GenerateRequest(spec=spec(model)), metadata=narrow, timeout=20
            ),
            lambda model: gateway.stub.CreateGeneration(
                inference_pb2.CreateGenerationRequest(spec=spec(model)), metadata=narrow, timeout=20
            ),
            lambda model: gateway.stub.Tokenize(
                inference_pb2.TokenizeRequest(model=model, prompt="ab"), metadata=narrow, timeout=20
            ),
        ):
            said = [await everything_said(call(model)) for model in ("secret", "nonsense", "not-here-yet")]
            assert said[0][0] is grpc.StatusCode.NOT_FOUND
            assert said == [said[0]] * 3
        assert gateway.scheduler.submits == []
        for auth, names in ((narrow, ["open"]), (gateway.auth, ["open", "secret", "simulated"])):
            answer = await gateway.stub.ListModels(inference_pb2.ListModelsRequest(), metadata=auth, timeout=20)
            assert [model.model for model in answer.models] == names
        request = inference_pb2.TokenizeRequest(model="open", prompt="ab")
        assert (await gateway.stub.Tokenize(request, metadata=narrow, timeout=20)).token_ids


async def test_an_oversized_message_is_refused_by_grpc_and_others_are_served_on(gateway: GatewayRig) -> None:
    huge = inference_pb2.GenerateRequest(spec=types_pb2.GenerationSpec(model="simulated", prompt="a" * (12 << 20)))
    call = gateway.stub.Generate(huge, metadata=gateway.auth, timeout=20)
    code, *_ = await everything_said(call)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert gateway.scheduler.submits == []
    request = inference_pb2.TokenizeRequest(model="simulated", prompt="ab")
    assert (await gateway.stub.Tokenize(request, metadata=gateway.auth, timeout=20)).token_ids


async def test_revocation_and_expiry_hold_within_five_seconds_at_every_gateway_that_knew_the_key(
    tmp_path: Path,
) -> None:
    times = [datetime.now(UTC)]
    async with (
        running_gateway(tmp_path, now=lambda: times[0]) as first,
        running_gateway(tmp_path, scheduler=first.scheduler, now=lambda: times[0]) as second,
    ):
        store = first.scheduler.store
        revoked = await add_key(store, "tenant")
        expiring = await add_key(store, "tenant", expires_at=times[0] + timedelta(seconds=3))
        for gateway in (first, second):
            for key in (revoked, expiring):
                assert await _code(gateway, key) is grpc.StatusCode.OK
        key_id = KeyId(f"key-{revoked.split('-')[2]}")
        await store.revoke_key(key_id, actor=ACTOR)
        times[0] += timedelta(seconds=3)
        for gateway in (first, second):
            assert await _code(gateway, expiring) is grpc.StatusCode.UNAUTHENTICATED
        times[0] += timedelta(seconds=2)
        for gateway in (first, second):
            assert await _code(gateway, revoked) is grpc.StatusCode.UNAUTHENTICATED
            assert await _code(gateway, first.key) is grpc.StatusCode.OK


async def _code(gateway: GatewayRig, key: str) -> grpc.StatusCode:
    try:
        await gateway.stub.ListModels(inference_pb2.ListModelsRequest(), metadata=bearer(key), timeout=20)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_a_flood_of_bad_keys_over_the_wire_is_told_when_to_come_back(gateway: GatewayRig) -> None:
    request = inference_pb2.ListModelsRequest()
    assert await _code(gateway, gateway.key) is grpc.StatusCode.OK
    failures = []
    for number in range(30):
        bad = f"sk-sluice-{number:012d}-{'x' * 43}"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway.stub.ListModels(request, metadata=bearer(bad), timeout=20)
        failures.append(parse_rpc_error(caught.value))
    assert {failure.code for failure in failures[:10]} == {grpc.StatusCode.UNAUTHENTICATED}
    limited = [failure for failure in failures if failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED]
    assert {failure.reason for failure in limited} == {"TOO_MANY_BAD_KEYS"}
    assert all(failure.retry_after is not None for failure in limited)
    assert await _code(gateway, gateway.key) is grpc.StatusCode.OK
