import asyncio
import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.config import StreamLimits
from inference.v1 import inference_pb2, types_pb2
from service_kit.delta import EMPTY_CHAIN, TokenLogprob, extend_chain
from service_kit.ids import GenerationId
from service_kit.rpc_status import RpcFailure, parse_rpc_error
from service_kit.sampling import FinishReason
from state_store.model import State
from tests.support.gateway import FAST, GatewayRig, running_gateway
from tests.support.polling import eventually

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


@pytest.mark.parametrize("is_log_kept", [True, False], ids=["from the log", "from the store"])
async def test_a_finished_generation_resumes_at_every_cursor(gateway: GatewayRig, is_log_kept: bool) -> None:
    generation_id = await run_to_end(gateway)
    if not is_log_kept:
        gateway.scheduler.log.lose_all()
    ref = inference_pb2.GenerationRef(generation_id=generation_id)
    for position in range(len(TEXT) + 1):
        call = gateway.stub.StreamGeneration(
            inference_pb2.StreamGenerationRequest(generation=ref, cursor=cursor_at(position)),
            metadata=gateway.auth,
            timeout=20,
        )
        first = await accepted(call)
        assert (first.created, first.state) == (False, types_pb2.GENERATION_STATE_SUCCEEDED)
        deltas = await deltas_of(call)
        assert "".join(delta.text for delta in deltas) == TEXT[position:]
        if position < len(TEXT):
            assert deltas[0].first_sequence_number == position + 1
        assert deltas[-1].cursor == cursor_at(len(TEXT))
        assert deltas[-1].usage.output_tokens == len(TEXT)


async def test_a_live_generation_resumes_at_every_cursor_and_goes_on(gateway: GatewayRig) -> None:
    _, generation_id = await start(gateway)
    await gateway.scheduler.produce(generation_id, list(b"hello "), list("hello "))
    calls = [
        gateway.stub.Generate(request(cursor=cursor_at(position)), metadata=gateway.auth, timeout=20)
        for position in range(7)
    ]
    for call in calls:
        first = await accepted(call)
        assert (first.created, first.generation_id) == (False, generation_id)
    await gateway.scheduler.produce(generation_id, list(b"world"), list("world"))
    await gateway.scheduler.finish(generation_id)
    for position, call in enumerate(calls):
        assert "".join(delta.text for delta in await deltas_of(call)) == TEXT[position:]


async def test_a_cursor_beyond_a_live_end_waits_for_it(gateway: GatewayRig) -> None:
    _, generation_id = await start(gateway)
    await gateway.scheduler.produce(generation_id, list(b"hell"), list("hell"))
    call = gateway.stub.Generate(request(cursor=cursor_at(6)), metadata=gateway.auth, timeout=20)
    await accepted(call)
    await gateway.scheduler.produce(generation_id, list(b"o world"), list("o world"))
    await gateway.scheduler.finish(generation_id)
    assert "".join(delta.text for delta in await deltas_of(call)) == "world"


async def test_a_cursor_beyond_a_live_end_is_refused_when_it_ends_short(gateway: GatewayRig) -> None:
    _, generation_id = await start(gateway)
    call = gateway.stub.Generate(request(cursor=cursor_at(6)), metadata=gateway.auth, timeout=20)
    await accepted(call)
    await gateway.scheduler.produce(generation_id, list(b"hell"), list("hell"))
    await gateway.scheduler.finish(generation_id)
    failure = await failure_of(call)
    assert (failure.code, failure.reason) == (grpc.StatusCode.OUT_OF_RANGE, "CURSOR_BEYOND_END")


@pytest.mark.parametrize("is_log_kept", [True, False])
async def test_a_cursor_beyond_a_finished_end_is_out_of_range(gateway: GatewayRig, is_log_kept: bool) -> None:
    await run_to_end(gateway)
    if not is_log_kept:
        gateway.scheduler.log.lose_all()
    cursor = types_pb2.Cursor(sequence_number=len(TEXT) + 1, chain=1)
    call = gateway.stub.Generate(request(cursor=cursor), metadata=gateway.auth, timeout=20)
    await accepted(call)
    failure = await failure_of(call)
    assert (failure.code, failure.reason) == (grpc.StatusCode.OUT_OF_RANGE, "CURSOR_BEYOND_END")


@pytest.mark.parametrize("position", [1, 2, 5, len(TEXT)])
@pytest.mark.parametrize("is_log_kept", [True, False])
async def test_another_chain_is_data_loss_for_that_reader_alone(
    gateway: GatewayRig, position: int, is_log_kept: bool
) -> None:
    await run_to_end(gateway)
    if not is_log_kept:
        gateway.scheduler.log.lose_all()
    cursor = types_pb2.Cursor(sequence_number=position, chain=99)
    call = gateway.stub.Generate(request(cursor=cursor), metadata=gateway.auth, timeout=20)
    await accepted(call)
    failure = await failure_of(call)
    assert (failure.code, failure.reason) == (grpc.StatusCode.DATA_LOSS, "OUTPUT_CONTRADICTED")
    again = gateway.stub.Generate(request(cursor=cursor_at(position)), metadata=gateway.auth, timeout=20)
    await accepted(again)
    assert "".join(delta.text for delta in await deltas_of(again)) == TEXT[position:]


async def test_a_generation_with_an_attempt_in_the_store_and_one_in_the_log_is_one_stream(gateway: GatewayRig) -> None:
    """The log begins behind stored chunks after its data was lost; the reader gets both parts."""
    _, generation_id = await start(gateway)
    await gateway.scheduler.produce(generation_id, list(b"hello "), list("hello "))
    await gateway.scheduler.store_and_lose_log(generation_id)
    await gateway.scheduler.grant(generation_id)
    call = gateway.stub.Generate(request(cursor=cursor_at(2)), metadata=gateway.auth, timeout=20)
    await accepted(call)
    await gateway.scheduler.produce(generation_id, list(b"world"), list("world"))
    await gateway.scheduler.finish(generation_id)
    assert "".join(delta.text for delta in await deltas_of(call)) == TEXT[2:]


@pytest.mark.parametrize("max_tokens_per_message", [1, 2, 1000])
async def test_log_probabilities_stand_beside_their_tokens_from_every_cursor(
    tmp_path: Path, max_tokens_per_message: int
) -> None:
    limits = replace(FAST, max_tokens_per_message=max_tokens_per_message)
    wanted = request()
    wanted.spec.sampling.logprobs = 1
    async with running_gateway(tmp_path, limits=limits) as gateway:
        call = gateway.stub.Generate(wanted, metadata=gateway.auth, timeout=20)
        generation_id = GenerationId((await accepted(call)).generation_id)
        await gateway.scheduler.grant(generation_id)
        scheduler = gateway.scheduler
        await scheduler.produce(generation_id, *logged("hello "))
        await scheduler.store_and_lose_log(generation_id)
        await scheduler.grant(generation_id)
        await scheduler.produce(generation_id, *logged("wor"))
        await scheduler.produce(generation_id, *logged("ld"))
        await scheduler.finish(generation_id)
        assert_aligned(await deltas_of(call), 0)
        for position in range(len(TEXT) + 1):
            wanted.cursor.CopyFrom(cursor_at(position))
            again = gateway.stub.Generate(wanted, metadata=gateway.auth, timeout=20)
            await accepted(again)
            assert_aligned(await deltas_of(again), position)
        await assert_model_is_gone_harmlessly(gateway, generation_id)


async def assert_model_is_gone_harmlessly(gateway: GatewayRig, generation_id: GenerationId) -> None:
    """Without the tokenizer of the generation's revision the numbers come without the tokens' bytes."""
    shutil.rmtree(gateway.config.models_dir / "simulated")
    await gateway.app.registry.rescan()
    named = inference_pb2.GenerationRef(generation_id=generation_id)
    call = gateway.stub.StreamGeneration(
        inference_pb2.StreamGenerationRequest(generation=named), metadata=gateway.auth, timeout=20
    )
    await accepted(call)
    logprobs = [logprob for delta in await deltas_of(call) for logprob in delta.logprobs]
    assert [logprob.logprob * -4 for logprob in logprobs] == list(TEXT.encode())
    assert {logprob.token for logprob in logprobs} == {b""}


def logged(text: str) -> tuple[list[int], list[str], list[TokenLogprob]]:
    """One token per character, with its log probability and one alternative."""
    token_ids = list(text.encode())
    return token_ids, list(text), [TokenLogprob(-each / 4, ((each + 1, -each / 8),)) for each in token_ids]


def assert_aligned(deltas: list[types_pb2.Delta], position: int) -> None:
    for delta in deltas:
        assert [logprob.logprob * -4 for logprob in delta.logprobs] == list(delta.token_ids)
        assert [logprob.top[0].token_id - 1 for logprob in delta.logprobs] == list(delta.token_ids)
        assert [logprob.top[0].logprob * -8 for logprob in delta.logprobs] == list(delta.token_ids)
        assert b"".join(logprob.token for logprob in delta.logprobs).decode() == delta.text
        assert [logprob.top[0].token for logprob in delta.logprobs] == [bytes([each + 1]) for each in delta.token_ids]
    assert "".join(delta.text for delta in deltas) == TEXT[position:]


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
