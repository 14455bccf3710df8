"""Every process may die while a stream runs; the reader sees a pause and nothing else."""

import asyncio
import signal

import pytest

from service_kit.errors import AbortedError, Reason
from sluice.client import SluiceClient
from sluice.client_events import Sampling
from sluice.local.services import Service
from sluice.timeline import parse_span
from tests.support.reader import Reader
from tests.support.stack import MODEL, RunningStack, eventually, simulated_output

NUM_TOKENS = 150


def _start(client: SluiceClient, prompt: str) -> Reader:
    return Reader(client.generate(MODEL, prompt, sampling=Sampling(max_output_tokens=NUM_TOKENS, seed=3, logprobs=1)))


def _expected(prompt: str) -> tuple[int, ...]:
    return simulated_output(prompt, seed=3, count=NUM_TOKENS)


async def test_a_killed_gateway_is_survived_through_the_other_one(stack: RunningStack) -> None:
    async with stack.client() as client:
        reader = _start(client, "gateway dies")
        await reader.until_token(20)
        stack.kill("gateway")
        await reader.until_end()
    assert reader.token_ids == reader.top_ids == _expected("gateway dies")
    assert stack.generation(reader.accepted.generation_id)["attempt"] == 1


async def test_a_killed_worker_is_survived_by_another_attempt(stack: RunningStack) -> None:
    async with stack.client() as client:
        reader = _start(client, "worker dies")
        await reader.until_token(20)
        stack.kill(await stack.session_of(reader.accepted.generation_id))
        await reader.until_end()
    assert reader.token_ids == reader.top_ids == _expected("worker dies")
    assert stack.generation(reader.accepted.generation_id)["attempt"] == 2
    assert reader.finished.output_tokens == NUM_TOKENS


async def test_a_hung_worker_is_replaced_and_its_late_words_are_refused(stack: RunningStack) -> None:
    async with stack.client() as client:
        reader = _start(client, "worker hangs")
        await reader.until_token(20)
        hung = await stack.session_of(reader.accepted.generation_id)
        stack.pause(hung)
        await reader.until_token(60)
        stack.resume(hung)
        await reader.until_end()
    assert reader.token_ids == reader.top_ids == _expected("worker hangs")
    assert stack.generation(reader.accepted.generation_id)["attempt"] == 2


@pytest.mark.parametrize("is_hung", [False, True], ids=["killed", "hung"])
async def test_a_lost_scheduler_is_survived_by_the_same_attempt(stack: RunningStack, *, is_hung: bool) -> None:
    prompt = f"scheduler lost {is_hung}"
    async with stack.client() as client:
        reader = _start(client, prompt)
        await reader.until_token(20)
        owner = stack.owner_of(reader.accepted.generation_id)
        (stack.pause if is_hung else stack.kill)(owner)
        await reader.until_token(100)
        stack.resume(owner)
        await reader.until_end()
    assert reader.token_ids == reader.top_ids == _expected(prompt)
    assert stack.generation(reader.accepted.generation_id)["attempt"] == 1


async def test_a_scheduler_told_to_stop_hands_its_sessions_over(stack: RunningStack) -> None:
    async with stack.client() as client:
        reader = _start(client, "scheduler stops")
        await reader.until_token(20)
        owner = stack.owner_of(reader.accepted.generation_id)
        stack.local.services[owner].send_signal(signal.SIGTERM)
        await reader.until_end()
    assert reader.token_ids == reader.top_ids == _expected("scheduler stops")
    assert stack.generation(reader.accepted.generation_id)["attempt"] == 1


async def test_all_schedulers_killed_and_started_again_lose_nothing(stack: RunningStack) -> None:
    async with stack.client() as client:
        reader = _start(client, "schedulers die")
        await reader.until_token(20)
        for name in stack.names(Service.SCHEDULER):
            stack.kill(name)
        for name in stack.names(Service.SCHEDULER):
            stack.local.start_service(name)
        await reader.until_end()
    assert reader.token_ids == reader.top_ids == _expected("schedulers die")


async def test_a_killed_valkey_is_survived(stack: RunningStack) -> None:
    async with stack.client() as client:
        reader = _start(client, "valkey dies")
        await reader.until_token(20)
        stack.local.valkey.kill()
        stack.local.valkey.start()
        await reader.until_end()
    assert reader.token_ids == reader.top_ids == _expected("valkey dies")


async def test_an_emptied_valkey_is_refilled_while_the_stream_goes_on(stack: RunningStack) -> None:
    async with stack.client() as client:
        reader = _start(client, "valkey emptied")
        await reader.until_token(20)
        stack.empty_valkey()
        await reader.until_end()
        replay = Reader(client.stream(generation_id=reader.accepted.generation_id))
        await replay.until_end()
    assert reader.token_ids == replay.token_ids == reader.top_ids == replay.top_ids == _expected("valkey emptied")
    assert stack.generation(reader.accepted.generation_id)["attempt"] == 1


async def test_an_emptied_valkey_and_a_killed_worker_together_are_computed_again(stack: RunningStack) -> None:
    async with stack.client() as client:
        reader = _start(client, "both lost")
        await reader.until_token(20)
        stack.kill(await stack.session_of(reader.accepted.generation_id))
        stack.empty_valkey()
        await reader.until_end()
    assert reader.token_ids == reader.top_ids == _expected("both lost")
    assert stack.generation(reader.accepted.generation_id)["attempt"] == 2


async def test_a_killed_postgres_is_survived(stack: RunningStack) -> None:
    async with stack.client() as client:
        reader = _start(client, "postgres dies")
        await reader.until_token(20)
        stack.local.postgres.kill()
        stack.local.postgres.start()
        await reader.until_end()
    assert reader.token_ids == reader.top_ids == _expected("postgres dies")
    assert stack.generation(reader.accepted.generation_id)["state"] == "SUCCEEDED"


async def test_everything_killed_at_once_continues_at_the_next_token(stack: RunningStack) -> None:
    async with stack.client() as client:
        reader = _start(client, "power cut")
        await reader.until_token(20)
        stack.local.kill()
        stack.local.postgres.start()
        stack.local.valkey.start()
        for name in stack.local.services:
            stack.local.start_service(name)
        await reader.until_end(timeout_s=90)
    assert reader.token_ids == reader.top_ids == _expected("power cut")
    row = stack.row(
        "SELECT count(*) AS rows, sum(output_tokens) AS tokens FROM usage_ledger WHERE generation_id = %s",
        reader.accepted.generation_id,
    )
    assert row == {"rows": 1, "tokens": NUM_TOKENS}


async def test_a_request_that_kills_every_worker_fails_and_its_15_neighbours_go_on(stack: RunningStack) -> None:
    prompts = [f"neighbour {number}" for number in range(15)]
    poisonous = "<<fault:crash>> and nothing else"
    async with stack.client() as client:
        neighbours = [_start(client, prompt) for prompt in prompts[:8]]
        await asyncio.gather(*(reader.until_token(5) for reader in neighbours))
        poison = Reader(client.generate(MODEL, poisonous, sampling=Sampling(max_output_tokens=5, seed=1)))
        neighbours += [_start(client, prompt) for prompt in prompts[8:]]
        with pytest.raises(AbortedError) as caught:
            await poison.until_end()
        await asyncio.gather(*(reader.until_end() for reader in neighbours))
    assert caught.value.reason == Reason.ATTEMPTS_EXHAUSTED
    for prompt, neighbour in zip(prompts, neighbours, strict=True):
        assert neighbour.token_ids == neighbour.top_ids == _expected(prompt)
        assert stack.generation(neighbour.accepted.generation_id)["charged_attempts"] <= 1
    generation_id = poison.accepted.generation_id
    ended = stack.generation(generation_id)
    assert (ended["state"], ended["charged_attempts"], ended["attempt"]) == ("FAILED", 3, 3)
    letter = stack.row("SELECT *, count(*) OVER () AS n FROM dead_letters WHERE generation_id = %s", generation_id)
    assert letter is not None
    assert (letter["n"], letter["reason"], letter["attempts"]) == (1, "ATTEMPTS_EXHAUSTED", 3)
    assert len(letter["worker_ids"]) == 3
    timed = stack.row(
        "SELECT count(*) AS n FROM attempts WHERE generation_id = %s AND is_charged AND granted_at < ended_at",
        generation_id,
    )
    assert timed == {"n": 3}
    said = [line for _, line in stack.lines if "neighbour 1" in line or "fault:" in line or "nothing else" in line]
    assert not said, "a prompt stands in a log"


async def test_one_trace_runs_through_all_services(stack: RunningStack) -> None:
    async with stack.client() as client:
        reader = _start(client, "traced")
        await reader.until_end()
    generation_id = reader.accepted.generation_id

    async def has_all() -> bool:
        lines = [line for path in stack.home.traces.glob("*.jsonl") for line in path.read_text().splitlines()]
        traces: dict[str, set[str]] = {}
        for line in lines:
            span = parse_span(line)
            if span is not None and generation_id in line:
                traces.setdefault(span.trace_id, set()).add(span.service)
        return len(traces) == 1 and set(Service) <= next(iter(traces.values()))

    await eventually(has_all, what="spans of all services under one trace id", timeout_s=10)


async def test_many_streams_at_once_are_all_exact(stack: RunningStack) -> None:
    async with stack.client() as client:
        readers = [_start(client, f"many {number}") for number in range(40)]
        await asyncio.gather(*(reader.until_end() for reader in readers))
    for number, reader in enumerate(readers):
        assert reader.token_ids == reader.top_ids == _expected(f"many {number}")
