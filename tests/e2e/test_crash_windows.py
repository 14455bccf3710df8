"""A process dies in each crash window of the repair table; what it left half-done is repaired within the time stated there.

Two schedulers run and one of them dies; the repair is the other one's, so the limits include the takeover of worker
sessions. SLACK_S is what a loaded machine may add to timers.
"""

import asyncio
import time
from datetime import UTC, datetime

from service_kit.delta import Cursor
from sluice.client import SluiceClient
from sluice.client_events import Sampling
from sluice.local.services import Service
from tests.support.reader import Reader
from tests.support.stack import MODEL, RunningStack, eventually, simulated_output

NUM_TOKENS = 30
SLACK_S = 1.5


async def _crash(stack: RunningStack, place: str, prompt: str, client: SluiceClient) -> tuple[Reader, datetime]:
    """Starts a generation whose scheduler dies at `place`; returns its reader and the moment of death."""
    stack.crash_file.write_text(place)
    reader = Reader(client.generate(MODEL, prompt, sampling=Sampling(max_output_tokens=NUM_TOKENS, seed=3)))
    return reader, await _death(stack, place)


async def _death(stack: RunningStack, place: str) -> datetime:
    async def has_died() -> bool:
        return not stack.crash_file.exists()

    await eventually(has_died, what=f"a scheduler dies at {place}")
    return datetime.now(tz=UTC)


async def _until_started(stack: RunningStack, prompt_of: Reader) -> datetime:
    """When the first grant was committed."""
    accepted = await prompt_of.until_accepted()
    started: list[datetime] = []

    async def has_started() -> bool:
        row = await asyncio.to_thread(stack.generation, accepted.generation_id)
        started.extend([row["started_at"]] if row["started_at"] else [])
        return bool(started)

    await eventually(has_started, what="the first grant")
    return started[0]


async def test_a_request_whose_scheduler_dies_before_the_commit_is_one_generation_all_the_same(
    stack: RunningStack,
) -> None:
    async with stack.client() as client:
        reader, _ = await _crash(stack, "submit.received", "never committed", client)
        await reader.until_end()
    assert reader.token_ids == simulated_output("never committed", seed=3, count=NUM_TOKENS)
    request_id = stack.generation(reader.accepted.generation_id)["request_id"]
    assert stack.row("SELECT count(*) AS n FROM generations WHERE request_id = %s", request_id) == {"n": 1}


async def test_a_row_committed_and_never_queued_is_queued_by_the_reaper_within_3_s(stack: RunningStack) -> None:
    async with stack.client() as client:
        reader, died_at = await _crash(stack, "submit.committed", "never queued", client)
        started_at = await _until_started(stack, reader)
        await reader.until_end()
    took_s = (started_at - died_at).total_seconds()
    print(f"commit, before enqueue: repaired after {took_s:.2f} s")
    assert took_s < 3 + SLACK_S
    assert reader.token_ids == simulated_output("never queued", seed=3, count=NUM_TOKENS)


async def test_an_entry_popped_and_never_granted_comes_back_within_5_s(stack: RunningStack) -> None:
    async with stack.client() as client:
        reader, died_at = await _crash(stack, "queue.popped", "never granted", client)
        started_at = await _until_started(stack, reader)
        await reader.until_end()
    took_s = (started_at - died_at).total_seconds()
    print(f"pop, before grant: repaired after {took_s:.2f} s")
    assert took_s < 5 + SLACK_S
    assert reader.token_ids == simulated_output("never granted", seed=3, count=NUM_TOKENS)


async def test_an_attempt_granted_and_never_assigned_is_assigned_within_4_s(stack: RunningStack) -> None:
    async with stack.client() as client:
        reader, died_at = await _crash(stack, "grant.committed", "never assigned", client)
        await reader.until_token(1)
        took_s = (datetime.now(tz=UTC) - died_at).total_seconds()
        await reader.until_end()
    print(f"grant, before assign: repaired after {took_s:.2f} s")
    assert took_s < 4 + SLACK_S
    assert reader.token_ids == simulated_output("never assigned", seed=3, count=NUM_TOKENS)
    assert stack.generation(reader.accepted.generation_id)["attempt"] == 1


async def test_an_end_committed_and_never_published_reaches_the_reader_within_2_s(stack: RunningStack) -> None:
    """The terminal publish is lost with its scheduler; the silence check finds the row."""
    async with stack.client() as client:
        reader, died_at = await _crash(stack, "finish.committed", "never told", client)
        await reader.until_end()
        took_s = (datetime.now(tz=UTC) - died_at).total_seconds()
    print(f"terminal commit, before close: repaired after {took_s:.2f} s")
    assert took_s < 2 + SLACK_S
    assert reader.token_ids == simulated_output("never told", seed=3, count=NUM_TOKENS)
    ledger = stack.row("SELECT count(*) AS n FROM usage_ledger WHERE generation_id = %s", reader.accepted.generation_id)
    assert ledger == {"n": 1}


async def test_an_attempt_requeued_and_never_sealed_is_fenced_at_the_next_grant(stack: RunningStack) -> None:
    prompt = "never sealed"
    async with stack.client() as client:
        reader = Reader(client.generate(MODEL, prompt, sampling=Sampling(max_output_tokens=100, seed=3)))
        await reader.until_token(10)
        stack.crash_file.write_text("requeue.committed")
        stack.kill(await stack.session_of(reader.accepted.generation_id))
        await _death(stack, "requeue.committed")
        await reader.until_end()
    assert reader.token_ids == simulated_output(prompt, seed=3, count=100)
    assert stack.generation(reader.accepted.generation_id)["attempt"] == 2


async def test_pushes_that_were_lost_reach_the_reader_within_2_s(stack: RunningStack) -> None:
    """The gateways' subscriptions are cut while tokens are appended: what was published meanwhile is gone."""
    prompt = "never pushed"
    async with stack.client() as client:
        reader = Reader(client.generate(MODEL, prompt, sampling=Sampling(max_output_tokens=150, seed=3)))
        longest_pause_s = 0.0
        for count in range(10, 150, 10):
            await reader.until_token(count)
            stack.cut_subscriptions()
            since = time.monotonic()
            await reader.until_token(count + 5)
            longest_pause_s = max(longest_pause_s, time.monotonic() - since)
        await reader.until_end()
        replay = Reader(client.stream(generation_id=reader.accepted.generation_id, cursor=Cursor()))
        await replay.until_end()
    print(f"append, before a publish is seen: longest pause {longest_pause_s:.2f} s")
    assert longest_pause_s < 2 + SLACK_S
    assert reader.token_ids == replay.token_ids == simulated_output(prompt, seed=3, count=150)


async def test_a_gateway_that_dies_before_it_submits_leaves_nothing_behind(stack: RunningStack) -> None:
    """Its reservation is leased; the repeated request is a request like any other."""
    stack.crash_file.write_text("quota.reserved")
    async with stack.client() as client:
        reader = Reader(
            client.generate(
                MODEL, "reserved", sampling=Sampling(max_output_tokens=NUM_TOKENS, seed=3), request_id="reserved"
            )
        )
        await _death(stack, "quota.reserved")
        await reader.until_end()
    rows = stack.row("SELECT count(*) AS n FROM generations WHERE request_id = 'reserved'")
    assert rows == {"n": 1}
    assert reader.token_ids == simulated_output("reserved", seed=3, count=NUM_TOKENS)
    assert stack.names(Service.GATEWAY)
