"""What tests of the gateway's streams do again and again."""

from typing import Any

import grpc
import pytest

from inference.v1 import inference_pb2, types_pb2
from service_kit.delta import EMPTY_CHAIN, extend_chain
from service_kit.ids import GenerationId
from service_kit.rpc_status import RpcFailure, parse_rpc_error
from tests.support.gateway import GatewayRig

TEXT = "hello world"
PROMPT_TOKENS = 3


def request(request_id: str = "r1", **changes: Any) -> inference_pb2.GenerateRequest:
    spec = types_pb2.GenerationSpec(model="simulated", prompt="ab", sampling=types_pb2.Sampling(temperature=0))
    return inference_pb2.GenerateRequest(request_id=request_id, spec=spec, **changes)


def cursor_at(position: int, text: str = TEXT) -> types_pb2.Cursor:
    if position == 0:
        return types_pb2.Cursor()
    return types_pb2.Cursor(sequence_number=position, chain=extend_chain(EMPTY_CHAIN, text.encode()[:position]))


async def accepted(call: Any) -> types_pb2.Accepted:
    message = await call.read()
    assert message.WhichOneof("event") == "accepted"
    return message.accepted


async def deltas_of(call: Any) -> list[types_pb2.Delta]:
    """All deltas after `accepted`, to the end of the stream."""
    return [message.delta async for message in call]


async def failure_of(call: Any) -> RpcFailure:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await deltas_of(call)
    return parse_rpc_error(caught.value)


async def start(gateway: GatewayRig, request_id: str = "r1") -> tuple[Any, GenerationId]:
    """An accepted and granted generation, and its stream."""
    call = gateway.stub.Generate(request(request_id), metadata=gateway.auth, timeout=20)
    generation_id = GenerationId((await accepted(call)).generation_id)
    await gateway.scheduler.grant(generation_id)
    return call, generation_id


async def run_to_end(gateway: GatewayRig, text: str = TEXT) -> GenerationId:
    """A finished generation with one delta per two bytes."""
    _, generation_id = await start(gateway)
    for index in range(0, len(text), 2):
        part = text[index : index + 2]
        await gateway.scheduler.produce(generation_id, list(part.encode()), list(part))
    await gateway.scheduler.finish(generation_id)
    return generation_id
