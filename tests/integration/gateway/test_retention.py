"""What a caller sees of a generation whose texts, or whose record, are no longer kept."""

from typing import Any

import grpc
import pytest

from inference.v1 import inference_pb2, types_pb2
from service_kit.delta import EMPTY_CHAIN, extend_chain
from service_kit.ids import GenerationId
from service_kit.rpc_status import RpcFailure, parse_rpc_error
from tests.support.gateway import GatewayRig, add_key, bearer


async def create(gateway: GatewayRig, request_id: str = "r1", **delivery: Any) -> GenerationId:
    """Ended, with five tokens."""
    request = inference_pb2.CreateGenerationRequest(
        request_id=request_id,
        spec=types_pb2.GenerationSpec(model="simulated", prompt="ab"),
        delivery=types_pb2.Delivery(**delivery),
    )
    response = await gateway.stub.CreateGeneration(request, metadata=gateway.auth, timeout=20)
    generation_id = GenerationId(response.accepted.generation_id)
    if response.accepted.created:
        await gateway.scheduler.grant(generation_id)
        await gateway.scheduler.produce_each(generation_id, "hello")
        await gateway.scheduler.finish(generation_id)
    return generation_id


async def delete_texts(gateway: GatewayRig, generation_id: GenerationId) -> None:
    await gateway.scheduler.log.drop_many([generation_id])
    assert await gateway.scheduler.store.delete_texts_many([generation_id]) == 1


async def get(gateway: GatewayRig, generation_id: GenerationId) -> types_pb2.Generation:
    request = inference_pb2.GetGenerationRequest(generation=inference_pb2.GenerationRef(generation_id=generation_id))
    response = await gateway.stub.GetGeneration(request, metadata=gateway.auth, timeout=20)
    generation: types_pb2.Generation = response.generation
    return generation


async def failure_of(call: Any) -> RpcFailure:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return parse_rpc_error(caught.value)


def stream(gateway: GatewayRig, generation_id: GenerationId, position: int, key: str | None = None) -> Any:
    cursor = types_pb2.Cursor(sequence_number=position)
    if position:
        cursor.chain = extend_chain(EMPTY_CHAIN, b"hello"[:position])
    request = inference_pb2.StreamGenerationRequest(
        generation=inference_pb2.GenerationRef(generation_id=generation_id), cursor=cursor
    )
    auth = bearer(key) if key is not None else gateway.auth
    return gateway.stub.StreamGeneration(request, metadata=auth, timeout=20)


NOT_KEPT = (grpc.StatusCode.OUT_OF_RANGE, "OUTPUT_NOT_KEPT")


@pytest.mark.parametrize(("delivery", "is_stored"), [({}, True), ({"store": True}, True), ({"store": False}, False)])
async def test_the_creating_call_says_whether_texts_are_stored(
    gateway: GatewayRig, delivery: dict[str, bool], is_stored: bool
) -> None:
    generation_id = await create(gateway, **delivery)
    assert (await gateway.scheduler.record(generation_id)).is_stored is is_stored
    assert await create(gateway, store=not is_stored) == generation_id, "it is no part of the request's identity"
    assert (await gateway.scheduler.record(generation_id)).is_stored is is_stored


async def test_the_record_is_shown_without_the_deleted_texts(gateway: GatewayRig) -> None:
    generation_id = await create(gateway, store=False)
    before = await get(gateway, generation_id)
    assert (before.text, before.HasField("texts_delete_time")) == ("hello", False)
    await delete_texts(gateway, generation_id)
    after = await get(gateway, generation_id)
    assert (after.text, list(after.token_ids), after.HasField("cursor")) == ("", [], False)
    assert after.HasField("texts_delete_time")
    assert (after.usage, after.state, after.is_final) == (before.usage, before.state, True)
    assert after.usage == types_pb2.Usage(prompt_tokens=3, output_tokens=5)
    listed = await gateway.stub.ListGenerations(
        inference_pb2.ListGenerationsRequest(), metadata=gateway.auth, timeout=20
    )
    assert listed.generations[0].usage.prompt_tokens == 3


@pytest.mark.parametrize("position", [0, 2, 5])
async def test_a_cursor_on_deleted_texts_is_out_of_range(gateway: GatewayRig, position: int) -> None:
    generation_id = await create(gateway, store=False)
    await delete_texts(gateway, generation_id)
    failure = await failure_of(stream(gateway, generation_id, position))
    assert (failure.code, failure.reason) == NOT_KEPT


@pytest.mark.parametrize("position", [0, 2])
async def test_a_generation_that_only_the_ledger_knows_is_out_of_range_for_its_tenant_alone(
    gateway: GatewayRig, position: int
) -> None:
    generation_id = await create(gateway)
    data = gateway.scheduler.store._data
    del data.generations[generation_id], data.chunks[generation_id]
    data.request_keys.clear()
    await gateway.scheduler.log.drop_many([generation_id])
    failure = await failure_of(stream(gateway, generation_id, position))
    assert (failure.code, failure.reason) == NOT_KEPT
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await get(gateway, generation_id)
    assert parse_rpc_error(caught.value).code is grpc.StatusCode.OUT_OF_RANGE
    other = await add_key(gateway.scheduler.store, "tenant-b")
    failure = await failure_of(stream(gateway, generation_id, position, other))
    assert failure.code is grpc.StatusCode.NOT_FOUND


async def test_an_expired_log_is_replayed_from_the_store_at_every_cursor(gateway: GatewayRig) -> None:
    generation_id = await create(gateway)
    gateway.scheduler.log.lose_all()
    for position in range(6):
        deltas = [
            message.delta async for message in stream(gateway, generation_id, position) if message.HasField("delta")
        ]
        assert "".join(delta.text for delta in deltas) == "hello"[position:]
        assert deltas[-1].finish_reason == types_pb2.FINISH_REASON_STOP
