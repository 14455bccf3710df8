"""Random deaths while many streams run: every stream is exact, and charged once."""

import asyncio
import random
from collections.abc import Iterator

import pytest

from sluice.client_events import Sampling
from sluice.local.services import Service
from tests.support.reader import Reader
from tests.support.stack import MODEL, RunningStack, running_stack, simulated_output

NUM_STREAMS = 24
NUM_TOKENS = 400
NUM_BLOWS = 10


@pytest.fixture(scope="module")
def slow_stack() -> Iterator[RunningStack]:
    counts = {Service.SCHEDULER: 2, Service.GPU_WORKER: 2, Service.GATEWAY: 2}
    with running_stack(counts=counts, tokens_per_s=20.0) as stack:
        yield stack


@pytest.fixture
async def stack(slow_stack: RunningStack) -> RunningStack:
    await slow_stack.heal()
    return slow_stack


async def _strike(stack: RunningStack, chance: random.Random) -> None:
    """Hurt one process or server, and bring it back after a moment."""
    name = chance.choice([*stack.local.services, "postgres", "valkey"])
    pause_s = chance.choice([0.1, 0.7, 2.0])
    if name in ("postgres", "valkey"):
        server = stack.local.postgres if name == "postgres" else stack.local.valkey
        server.kill()
        await asyncio.sleep(pause_s)
        server.start()
    elif chance.random() < 0.3:
        stack.pause(name)
        await asyncio.sleep(3 * pause_s)
        stack.resume(name)
    else:
        stack.kill(name)
        await asyncio.sleep(pause_s)
        stack.local.start_service(name)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2])
async def test_random_deaths_of_everything_change_no_stream(stack: RunningStack, seed: int) -> None:
    chance = random.Random(seed)
    async with stack.client() as client:
        readers = [
            Reader(
                client.generate(
                    MODEL,
                    f"chaos {seed} {number}",
                    sampling=Sampling(max_output_tokens=NUM_TOKENS, seed=number, logprobs=1),
                    request_id=f"chaos-{seed}-{number}",
                )
            )
            for number in range(NUM_STREAMS)
        ]
        for reader in readers:
            await reader.until_token(1)
        for _ in range(NUM_BLOWS):
            await _strike(stack, chance)
            await asyncio.sleep(chance.uniform(0.2, 1.0))
        await stack.heal()
        await asyncio.gather(*(reader.until_end(timeout_s=120) for reader in readers))
    for number, reader in enumerate(readers):
        expected = simulated_output(f"chaos {seed} {number}", seed=number, count=NUM_TOKENS)
        assert reader.token_ids == reader.top_ids == expected
    ledger = stack.row(
        "SELECT count(*) AS rows, count(DISTINCT generation_id) AS generations, sum(usage_ledger.output_tokens)::bigint AS tokens"
        " FROM usage_ledger JOIN generations USING (generation_id) WHERE request_id LIKE %s",
        f"chaos-{seed}-%",
    )
    assert ledger == {"rows": NUM_STREAMS, "generations": NUM_STREAMS, "tokens": NUM_STREAMS * NUM_TOKENS}
