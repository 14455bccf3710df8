"""A stream that begins at a cursor: the rest, exactly, from the log, from the store and from both."""

import shutil
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from inference.v1 import inference_pb2, types_pb2
from service_kit.delta import TokenLogprob
from service_kit.ids import GenerationId
from tests.integration.gateway.stream_steps import (
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
