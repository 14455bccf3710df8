"""One request id is one execution, one stream and one charge, however often and however simultaneously it is sent."""

import asyncio
from datetime import timedelta

from service_kit.delta import Cursor
from sluice.client_events import Sampling
from tests.support.reader import Reader
from tests.support.stack import MODEL, RunningStack, simulated_output

NUM_TOKENS = 40


async def test_the_same_request_id_twice_at_once_is_one_execution_with_two_identical_streams(
    stack: RunningStack,
) -> None:
    sampling = Sampling(max_output_tokens=NUM_TOKENS, seed=5)
    async with stack.client() as left, stack.client(targets=tuple(reversed(stack.local.gateways))) as right:
        readers = [
            Reader(client.generate(MODEL, "twice", sampling=sampling, request_id="twice-at-once"))
            for client in (left, right)
        ]
        await asyncio.gather(*(reader.until_end() for reader in readers))
    assert readers[0].token_ids == readers[1].token_ids == simulated_output("twice", seed=5, count=NUM_TOKENS)
    assert readers[0].text == readers[1].text
    assert readers[0].accepted.generation_id == readers[1].accepted.generation_id
    assert sorted(reader.accepted.is_created for reader in readers) == [False, True]
    generation_id = readers[0].accepted.generation_id
    ledger = stack.row("SELECT count(*) AS n FROM usage_ledger WHERE generation_id = %s", generation_id)
    attempts = stack.row("SELECT count(*) AS n FROM attempts WHERE generation_id = %s", generation_id)
    assert (ledger, attempts) == ({"n": 1}, {"n": 1})


async def test_a_retry_with_another_cursor_deadline_or_trace_is_the_same_generation(stack: RunningStack) -> None:
    sampling = Sampling(max_output_tokens=NUM_TOKENS, seed=5)
    async with stack.client() as client:
        first = Reader(client.generate(MODEL, "retry", sampling=sampling, request_id="retried"))
        await first.until_token(10)
        cursor: Cursor = first.cursor
        again = Reader(
            client.generate(
                MODEL,
                "retry",
                sampling=sampling,
                request_id="retried",
                cursor=cursor,
                grace=timedelta(seconds=3),
                deadline=timedelta(minutes=3),
            )
        )
        await first.until_end()
        await again.until_end()
    assert again.accepted.generation_id == first.accepted.generation_id
    assert not again.accepted.is_created
    assert again.token_ids == first.token_ids[cursor.sequence_number :]
