"""Streams whose pushes, log or ends are missing for a while."""

import asyncio

from inference.v1 import types_pb2
from service_kit.ids import GenerationId
from tests.integration.gateway.stream_steps import (
    TEXT,
    accepted,
    deltas_of,
    request,
    start,
)
from tests.support.gateway import GatewayRig


async def test_an_end_that_was_committed_and_never_told_is_found_by_the_silence_check(gateway: GatewayRig) -> None:
    call, generation_id = await start(gateway)
    await gateway.scheduler.produce_each(generation_id, TEXT)
    await gateway.scheduler.finish(generation_id, is_told=False)
    deltas = await deltas_of(call)
    assert "".join(delta.text for delta in deltas) == TEXT
    assert deltas[-1].finish_reason == types_pb2.FINISH_REASON_STOP


async def test_pushes_lost_with_a_connection_are_made_up_for(gateway: GatewayRig) -> None:
    call, generation_id = await start(gateway)
    log = gateway.scheduler.log
    await gateway.scheduler.produce(generation_id, list(b"he"), list("he"))
    assert (await call.read()).delta.text == "he"
    await gateway.scheduler.produce(generation_id, list(b"llo "), list("llo "))
    log.interrupt()
    async with asyncio.timeout(5):
        assert (await call.read()).delta.text == "llo "
    await gateway.scheduler.produce(generation_id, list(b"world"), list("world"))
    await gateway.scheduler.finish(generation_id)
    assert "".join(delta.text for delta in await deltas_of(call)) == "world"


async def test_a_stream_opened_while_the_log_is_away_starts_when_it_is_back(gateway: GatewayRig) -> None:
    gateway.scheduler.log.is_reachable = False
    call = gateway.stub.Generate(request(), metadata=gateway.auth, timeout=20)
    generation_id = GenerationId((await accepted(call)).generation_id)
    gateway.scheduler.log.is_reachable = True
    await gateway.scheduler.grant(generation_id)
    await gateway.scheduler.produce_each(generation_id, TEXT)
    await gateway.scheduler.finish(generation_id)
    assert "".join(delta.text for delta in await deltas_of(call)) == TEXT


async def test_a_stream_ends_from_the_row_while_the_log_is_away(gateway: GatewayRig) -> None:
    call, generation_id = await start(gateway)
    await gateway.scheduler.produce_each(generation_id, TEXT)
    await gateway.scheduler.finish(generation_id, is_told=False)
    gateway.scheduler.log.is_reachable = False
    assert "".join(delta.text for delta in await deltas_of(call)) == TEXT
