"""A store that is away costs time and no request: what runs goes on, what is new hears so at once, nothing alive is taken.

How soon the new ones hear it is a figure of `make bench-stores`; SLACK_S is what a loaded machine may add to the second.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from redis import Redis

from service_kit.errors import Reason, UnavailableError
from sluice.client import ClientSettings, SluiceClient
from sluice.client_events import Sampling
from sluice.local.services import Service
from sluice.retry import RetryPolicy
from tests.support.polling import eventually
from tests.support.processes import send_to_tree
from tests.support.reader import Reader
from tests.support.stack import MODEL, RunningStack, simulated_output

OUTAGE_S = 7.0
"""Longer than the lease of a worker."""
SLACK_S = 1.5
NUM_LONG, NUM_SHORT = 6, 6
LONG, SHORT = 600, 100
"""Tokens; 50 a second: the short ones end while the store is away, the long ones afterwards."""


@contextlib.contextmanager
def postgres_stopped(stack: RunningStack) -> Iterator[None]:
    """Stands still with all its processes; connections stay and nothing answers."""
    pid = stack.local.postgres.pid
    assert pid is not None
    send_to_tree(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        send_to_tree(pid, signal.SIGCONT)


@contextlib.contextmanager
def postgres_killed(stack: RunningStack) -> Iterator[None]:
    stack.local.postgres.kill()
    try:
        yield
    finally:
        stack.local.postgres.start()


def start(client: SluiceClient, prompt: str, num_tokens: int) -> Reader:
    sampling = Sampling(max_output_tokens=num_tokens, seed=3)
    return Reader(client.generate(MODEL, prompt, sampling=sampling, request_id=prompt))


def check(stack: RunningStack, readers: dict[str, Reader]) -> None:
    """Every output is exact, of the first attempt, and charged once."""
    for prompt, reader in readers.items():
        assert reader.token_ids == simulated_output(prompt, seed=3, count=len(reader.token_ids)), prompt
    ids = [reader.accepted.generation_id for reader in readers.values()]
    assert stack.row(
        "SELECT count(*) AS rows, count(*) FILTER (WHERE state <> 'SUCCEEDED') AS bad, max(attempt) AS attempts,"
        " (SELECT count(*) FROM usage_ledger WHERE generation_id = ANY(%s::uuid[])) AS charges"
        " FROM generations WHERE generation_id = ANY(%s::uuid[])",
        ids,
        ids,
    ) == {"rows": len(ids), "bad": 0, "attempts": 1, "charges": len(ids)}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("outage", [postgres_stopped, postgres_killed])
async def test_while_postgres_is_away_streams_flow_and_new_requests_hear_so(stack: RunningStack, outage) -> None:
    name = outage.__name__
    settings = ClientSettings(
        targets=tuple(stack.local.gateways), api_key=stack.api_key, retry=RetryPolicy(give_up_after=timedelta(0))
    )
    async with stack.client() as client, SluiceClient(settings) as hasty:
        long = {f"{name}-long-{n}": start(client, f"{name}-long-{n}", LONG) for n in range(NUM_LONG)}
        short = {f"{name}-short-{n}": start(client, f"{name}-short-{n}", SHORT) for n in range(NUM_SHORT)}
        for reader in (*long.values(), *short.values()):
            await reader.until_token(5)
        with outage(stack):
            began_s = time.monotonic()
            refused_s = []
            while time.monotonic() - began_s < OUTAGE_S:
                asked_s = time.monotonic()
                with pytest.raises(UnavailableError) as caught:
                    await hasty.create(MODEL, "new", request_id=f"{name}-new-{len(refused_s)}")
                assert caught.value.reason == Reason.STORE_UNAVAILABLE
                refused_s.append(time.monotonic() - asked_s)
                await asyncio.sleep(0.2)
            for reader in long.values():
                await reader.until_token(5 + round(OUTAGE_S * 50 / 2))
            for reader in short.values():
                await reader.until_token(SHORT)
        print(f"{name}: refused after at most {max(refused_s):.2f} s")
        assert max(refused_s) < 1 + SLACK_S
        await asyncio.gather(*(reader.until_end() for reader in (*long.values(), *short.values())))
    check(stack, long | short)
    assert all(len(reader.token_ids) == LONG for reader in long.values())


@pytest.mark.timeout(180)
async def test_an_emptied_redis_is_refilled_under_load_and_loses_nothing(stack: RunningStack) -> None:
    """Of what runs and of what waits; nobody is told of a loss."""
    async with stack.client() as client:
        readers = {f"emptied-{n}": start(client, f"emptied-{n}", 150) for n in range(24)}
        for reader in readers.values():
            await reader.until_accepted()
        await next(iter(readers.values())).until_token(5)
        with Redis.from_url(stack.local.valkey.url) as redis:
            redis.flushall()
        await asyncio.gather(*(reader.until_end() for reader in readers.values()))
    check(stack, readers)
    assert all(len(reader.token_ids) == 150 for reader in readers.values())


@pytest.mark.timeout(180)
async def test_requests_that_wait_when_redis_is_emptied_run_in_the_end(stack: RunningStack) -> None:
    """Without a worker, all of them wait in the queue only."""
    count = 20
    running = "SELECT FROM worker_sessions JOIN generations USING (session_id) WHERE generations.state = 'RUNNING'"
    for name in stack.names(Service.GPU_WORKER):
        stack.kill(name)
    await eventually(lambda: stack.row("SELECT FROM worker_sessions WHERE state = 'LIVE'") is None)
    async with stack.client() as client:
        sampling = Sampling(max_output_tokens=20, seed=3)
        for n in range(count):
            await client.create(MODEL, f"waiting-{n}", sampling=sampling, request_id=f"waiting-{n}")
        assert stack.row(running) is None
        with Redis.from_url(stack.local.valkey.url) as redis:
            redis.flushall()
        for name in stack.names(Service.GPU_WORKER):
            stack.local.start_service(name)
        readers = {f"waiting-{n}": Reader(client.stream(request_id=f"waiting-{n}")) for n in range(count)}
        await asyncio.gather(*(reader.until_end() for reader in readers.values()))
    check(stack, readers)
