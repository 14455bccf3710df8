import asyncio
from datetime import timedelta

import pytest

from inference.v1 import types_pb2
from service_kit.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError, Reason, UnauthenticatedError
from service_kit.sampling import FinishReason
from sluice.client_events import Message, Sampling
from tests.support.reader import Reader
from tests.support.stack import MODEL, RunningStack, eventually, prompt_ids, simulated_output


def _sampling(count: int, seed: int = 7) -> Sampling:
    return Sampling(max_output_tokens=count, seed=seed)


async def test_the_stream_is_exactly_the_engines_output_and_is_recorded_with_its_usage(stack: RunningStack) -> None:
    expected = simulated_output("hello", seed=7, count=40)
    async with stack.client() as client:
        reader = Reader(client.generate(MODEL, "hello", sampling=_sampling(40)))
        finished = await reader.until_end()
        record = await client.get(generation_id=reader.accepted.generation_id)
    assert reader.token_ids == expected
    assert reader.text == bytes(expected).decode()
    assert (finished.finish_reason, finished.output_tokens) == (FinishReason.LENGTH, 40)
    assert finished.prompt_tokens == reader.accepted.prompt_tokens == len(prompt_ids("hello"))
    assert record.state == types_pb2.GENERATION_STATE_SUCCEEDED
    assert record.is_final
    assert record.text == reader.text
    assert record.attempts == 1
    usage = stack.row(
        "SELECT count(*) AS rows, sum(output_tokens) AS tokens FROM usage_ledger WHERE generation_id = %s",
        reader.accepted.generation_id,
    )
    assert usage == {"rows": 1, "tokens": 40}


async def test_a_repeated_request_id_attaches_and_another_request_under_it_is_refused(stack: RunningStack) -> None:
    async with stack.client() as client:
        first = Reader(client.generate(MODEL, "same", sampling=_sampling(30), request_id="e2e-same"))
        await first.until_token(5)
        second = Reader(client.generate(MODEL, "same", sampling=_sampling(30), request_id="e2e-same"))
        await asyncio.gather(first.until_end(), second.until_end())
        other = Reader(client.generate(MODEL, "different", sampling=_sampling(30), request_id="e2e-same"))
        with pytest.raises(AlreadyExistsError) as caught:
            await other.until_end()
    assert caught.value.reason == Reason.REQUEST_ID_REUSED
    assert first.accepted.is_created
    assert not second.accepted.is_created
    assert first.accepted.generation_id == second.accepted.generation_id
    assert first.token_ids == second.token_ids == simulated_output("same", seed=7, count=30)


async def test_a_reader_who_left_comes_back_at_the_next_token(stack: RunningStack) -> None:
    async with stack.client() as client:
        first = Reader(client.generate(MODEL, "leave", sampling=_sampling(60), request_id="e2e-leave"))
        await first.until_token(10)
        await first.leave()
        second = Reader(
            client.generate(MODEL, "leave", sampling=_sampling(60), request_id="e2e-leave", cursor=first.cursor)
        )
        await second.until_end()
        replay = Reader(client.stream(request_id="e2e-leave"))
        await replay.until_end()
    assert first.token_ids + second.token_ids == replay.token_ids == simulated_output("leave", seed=7, count=60)


async def test_a_generation_is_cancelled_within_a_moment_and_keeps_its_output(stack: RunningStack) -> None:
    async with stack.client() as client:
        reader = Reader(client.generate(MODEL, "stop me", sampling=_sampling(3000)))
        await reader.until_token(5)
        await client.cancel(generation_id=reader.accepted.generation_id)
        finished = await reader.until_end(timeout_s=5)
        record = await client.get(generation_id=reader.accepted.generation_id)
    assert finished.finish_reason is FinishReason.CANCELLED
    assert record.state == types_pb2.GENERATION_STATE_CANCELLED
    assert finished.output_tokens == len(reader.token_ids) == record.usage.output_tokens
    assert reader.token_ids == simulated_output("stop me", seed=7, count=len(reader.token_ids))


async def test_an_abandoned_generation_ends_after_its_grace(stack: RunningStack) -> None:
    async with stack.client() as client:
        reader = Reader(client.generate(MODEL, "abandoned", sampling=_sampling(5000), grace=timedelta(seconds=1)))
        accepted = await reader.until_accepted()
        await reader.until_token(1)
        await reader.leave()

        async def is_cancelled() -> bool:
            record = await client.get(generation_id=accepted.generation_id)
            return record.state == types_pb2.GENERATION_STATE_CANCELLED

        await eventually(is_cancelled, what="the generation is cancelled", timeout_s=40)


async def test_a_conversation_is_rendered_and_a_stop_string_ends_it(stack: RunningStack) -> None:
    async with stack.client() as client:
        full = Reader(client.generate(MODEL, [Message(role="user", content="hi")], sampling=_sampling(60)))
        await full.until_end()
        stop = full.text[20:23]
        cut = Reader(
            client.generate(
                MODEL,
                [Message(role="user", content="hi")],
                sampling=Sampling(max_output_tokens=60, seed=7, stop=(stop,)),
            )
        )
        finished = await cut.until_end()
    assert cut.text == full.text[: full.text.index(stop)]
    assert (finished.finish_reason, finished.matched_stop) == (FinishReason.STOP, stop)


async def test_refusals_name_the_reason_and_the_field(stack: RunningStack) -> None:
    async with stack.client() as client, stack.client(api_key="sk-sluice-000000000000-" + "x" * 32) as stranger:
        with pytest.raises(UnauthenticatedError):
            await Reader(stranger.generate(MODEL, "hi")).until_end()
        with pytest.raises(NotFoundError) as unknown:
            await Reader(client.generate("no-such-model", "hi")).until_end()
        with pytest.raises(InvalidArgumentError) as bad:
            await Reader(client.generate(MODEL, "hi", sampling=Sampling(top_p=2.0))).until_end()
        with pytest.raises(NotFoundError):
            await client.get(generation_id="01900000-0000-7000-8000-000000000000")
    assert unknown.value.reason == Reason.MODEL_NOT_FOUND
    assert bad.value.field == "spec.sampling.top_p"
