"""Streams from `accepted` to their end: pace, readers that leave, failures, a drain."""

import asyncio
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from gateway.config import StreamLimits
from inference.v1 import inference_pb2, types_pb2
from service_kit.ids import GenerationId
from service_kit.rpc_status import parse_rpc_error
from service_kit.sampling import FinishReason
from state_store.model import State
from tests.integration.gateway.stream_steps import (
    PROMPT_TOKENS,
    TEXT,
    accepted,
    cursor_at,
    deltas_of,
    failure_of,
    request,
    run_to_end,
    start,
)
from tests.support.gateway import FAST, GatewayRig, running_gateway
from tests.support.polling import eventually


async def test_a_generation_is_accepted_streamed_and_ended_with_usage(gateway: GatewayRig) -> None:
    call = gateway.stub.Generate(request(), metadata=gateway.auth, timeout=20)
    first = await accepted(call)
    generation_id = GenerationId(first.generation_id)
    headers = dict(await call.initial_metadata())
    assert headers["x-generation-id"] == generation_id
    assert headers["x-request-id"] == "r1"
    assert (first.request_id, first.created, first.prompt_tokens) == ("r1", True, PROMPT_TOKENS)
    assert first.state == types_pb2.GENERATION_STATE_QUEUED
    await gateway.scheduler.grant(generation_id)
    await gateway.scheduler.produce_each(generation_id, TEXT)
    await gateway.scheduler.finish(generation_id, reason=FinishReason.STOP, matched_stop="!")
    deltas = await deltas_of(call)
    assert "".join(delta.text for delta in deltas) == TEXT
    assert [token_id for delta in deltas for token_id in delta.token_ids] == list(TEXT.encode())
    numbers = [delta.first_sequence_number for delta in deltas if delta.token_ids]
    assert numbers == sorted(numbers)
    assert numbers[0] == 1
    assert deltas[-1].cursor == cursor_at(len(TEXT))
    assert deltas[-1].finish_reason == types_pb2.FINISH_REASON_STOP
    assert deltas[-1].matched_stop == "!"
    assert deltas[-1].usage == types_pb2.Usage(prompt_tokens=PROMPT_TOKENS, output_tokens=len(TEXT))
    assert all(not delta.HasField("usage") and not delta.finish_reason for delta in deltas[:-1])


async def test_a_token_reaches_the_client_while_the_next_is_not_there_yet(gateway: GatewayRig) -> None:
    call, generation_id = await start(gateway)
    for byte in b"abc":
        await gateway.scheduler.produce(generation_id, [byte], [chr(byte)])
        async with asyncio.timeout(5):
            message = await call.read()
        assert message.delta.text == chr(byte)
    call.cancel()


async def test_a_slow_client_gets_everything_and_the_gateway_buffers_little(tmp_path: Path) -> None:
    limits = StreamLimits(max_buffered_pushes=4, silence=FAST.silence, tick=FAST.tick, max_tokens_per_message=1000)
    async with running_gateway(tmp_path, limits=limits) as gateway:
        call, generation_id = await start(gateway)
        texts = [f"{index:05d}" + "x" * 5000 for index in range(400)]
        for text in texts:
            await gateway.scheduler.produce(generation_id, [7], [text])
            await asyncio.sleep(0)
        await gateway.scheduler.finish(generation_id)
        received = await deltas_of(call)
        assert "".join(delta.text for delta in received) == "".join(texts)
        # What did not fit the inbox came from the log, in fewer and fatter messages.
        assert len(received) < len(texts)


async def test_a_client_that_leaves_ends_the_watching_at_once(gateway: GatewayRig) -> None:
    call, generation_id = await start(gateway)
    log = gateway.scheduler.log

    async def is_watched() -> bool:
        before = (await log.last_watched_many([generation_id]))[0]
        await asyncio.sleep(0.005)
        after = (await log.last_watched_many([generation_id]))[0]
        return before != after

    assert await is_watched()
    call.cancel()
    async with asyncio.timeout(5):
        while await is_watched():
            pass
    await asyncio.wait_for(gateway.app.hub.wait_idle(), 5)


async def test_the_generation_stays_watched_while_another_client_reads(gateway: GatewayRig) -> None:
    first, generation_id = await start(gateway)
    second = gateway.stub.Generate(request(), metadata=gateway.auth, timeout=20)
    await accepted(second)
    first.cancel()
    await gateway.scheduler.produce(generation_id, list(b"hello"), list("hello"))
    await gateway.scheduler.finish(generation_id)
    assert "".join(delta.text for delta in await deltas_of(second)) == "hello"


@pytest.mark.parametrize(
    ("state", "error_reason", "code"),
    [
        (State.FAILED, "ATTEMPTS_EXHAUSTED", grpc.StatusCode.ABORTED),
        (State.FAILED, "ENGINE_FAILURE", grpc.StatusCode.INTERNAL),
        (State.EXPIRED, "DEADLINE", grpc.StatusCode.DEADLINE_EXCEEDED),
    ],
)
async def test_a_failed_generation_ends_with_its_status_after_the_last_delta(
    gateway: GatewayRig, state: State, error_reason: str, code: grpc.StatusCode
) -> None:
    call, generation_id = await start(gateway)
    await gateway.scheduler.produce(generation_id, list(b"hell"), list("hell"))
    await gateway.scheduler.finish(generation_id, state, error_reason=error_reason)
    text = ""
    with pytest.raises(grpc.aio.AioRpcError) as caught:  # noqa: PT012
        async for message in call:
            text += message.delta.text
            assert not message.delta.finish_reason
    failure = parse_rpc_error(caught.value)
    assert text == "hell"
    assert (failure.code, failure.reason) == (code, error_reason)


async def test_a_request_that_expired_in_the_queue_says_so(gateway: GatewayRig) -> None:
    call = gateway.stub.Generate(request(), metadata=gateway.auth, timeout=20)
    generation_id = GenerationId((await accepted(call)).generation_id)
    await gateway.scheduler.finish(generation_id, State.EXPIRED, error_reason="QUEUE_TIMEOUT")
    failure = await failure_of(call)
    assert (failure.code, failure.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "QUEUE_TIMEOUT")


async def test_a_cancelled_stream_ends_with_what_was_there(gateway: GatewayRig) -> None:
    call, generation_id = await start(gateway)
    await gateway.scheduler.produce(generation_id, list(b"hell"), list("hell"))
    answer = await gateway.stub.CancelGeneration(
        inference_pb2.CancelGenerationRequest(generation=inference_pb2.GenerationRef(request_id="r1")),
        metadata=gateway.auth,
    )
    assert (answer.state, answer.generation_id) == (types_pb2.GENERATION_STATE_CANCELLED, generation_id)
    deltas = await deltas_of(call)
    assert "".join(delta.text for delta in deltas) == "hell"
    assert deltas[-1].finish_reason == types_pb2.FINISH_REASON_CANCELLED
    assert deltas[-1].usage.output_tokens == 4


async def test_a_long_replay_is_cut_into_messages_that_each_end_at_a_cursor(tmp_path: Path) -> None:
    limits = StreamLimits(max_tokens_per_message=3, silence=FAST.silence, tick=FAST.tick)
    async with running_gateway(tmp_path, limits=limits) as gateway:
        await run_to_end(gateway)
        call = gateway.stub.Generate(request(), metadata=gateway.auth, timeout=20)
        await accepted(call)
        deltas = await deltas_of(call)
        assert [len(delta.token_ids) for delta in deltas] == [3, 3, 3, 2]
        assert [delta.cursor for delta in deltas] == [cursor_at(n) for n in (3, 6, 9, 11)]


async def test_a_draining_gateway_refuses_new_work_and_sends_running_streams_elsewhere(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, drain=timedelta(milliseconds=100)) as gateway:
        call, generation_id = await start(gateway)
        await gateway.scheduler.produce(generation_id, list(b"hell"), list("hell"))
        assert (await call.read()).delta.text == "hell"
        stopping = asyncio.create_task(gateway.app.stop())
        failure = await failure_of(call)
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert failure.retry_after is not None
        await stopping
    async with running_gateway(tmp_path, scheduler=gateway.scheduler) as other:
        again = other.stub.Generate(request(cursor=cursor_at(4)), metadata=gateway.auth, timeout=20)
        assert not (await accepted(again)).created
        await other.scheduler.produce(generation_id, list(b"o world"), list("o world"))
        await other.scheduler.finish(generation_id)
        assert "".join(delta.text for delta in await deltas_of(again)) == "o world"


async def test_a_stream_that_ends_within_the_drain_time_ends_well(gateway: GatewayRig) -> None:
    call, generation_id = await start(gateway)
    stopping = asyncio.create_task(gateway.app.stop())
    await eventually(lambda: gateway.app.hub.is_draining)
    await gateway.scheduler.produce_each(generation_id, TEXT)
    await gateway.scheduler.finish(generation_id)
    assert "".join(delta.text for delta in await deltas_of(call)) == TEXT
    await stopping
