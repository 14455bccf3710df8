"""After mixed requests and the retention periods nothing is left but what the policy keeps."""

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from redis import Redis

from service_kit.errors import ExpiredError, OutOfRangeError, Reason
from sluice.client import SluiceClient
from sluice.client_events import Sampling
from state_store.postgres.partitions import drop_partitions
from tests.e2e.reader import Reader
from tests.support.stack import MODEL, RunningStack, eventually, running_stack

DAY = timedelta(days=1)
ROUNDS = 5
SHORT, LONG = Sampling(max_output_tokens=20, seed=7), Sampling(max_output_tokens=3000, seed=7, ignore_eos=True)
KEPT = re.compile(
    r"log:\{s0\}:kept_since|queue:(marker|models)|\{q:[^}]*\}:(marker|meta|idle_counters)"
    r"|\{quota:\d+\}:(marker|settled|(requests|tokens|use):.*)"
)
"""Markers, and counts of tenants that no request is in: what came of all requests together, not of one."""


@pytest.fixture(scope="module")
def brief() -> Iterator[RunningStack]:
    """A stack whose logs are kept for a second."""
    with running_stack(tokens_per_s=200.0, overrides={"SLUICE_LOG_KEPT_S": "1"}) as stack:
        yield stack


async def stream(client: SluiceClient, name: str) -> Reader:
    reader = Reader(client.generate(MODEL, name, sampling=SHORT, request_id=name))
    await reader.until_end()
    return reader


async def stream_unstored(client: SluiceClient, name: str) -> Reader:
    reader = Reader(client.generate(MODEL, name, sampling=SHORT, request_id=name, store=False))
    await reader.until_end()
    return reader


async def leave(client: SluiceClient, name: str) -> Reader:
    reader = Reader(client.generate(MODEL, name, sampling=LONG, request_id=name, grace=timedelta(0)))
    await reader.until_token(3)
    await reader.leave()
    return reader


async def cancel(client: SluiceClient, name: str) -> Reader:
    reader = Reader(client.generate(MODEL, name, sampling=LONG, request_id=name))
    await reader.until_token(1)
    await client.cancel(request_id=name)
    await reader.until_end()
    return reader


async def expire(client: SluiceClient, name: str) -> Reader:
    brief = timedelta(milliseconds=300)
    reader = Reader(client.generate(MODEL, name, sampling=LONG, request_id=name, deadline=brief))
    with pytest.raises(ExpiredError):
        await reader.until_end()
    return reader


async def repeat(client: SluiceClient, name: str) -> Reader:
    first, second = await asyncio.gather(stream(client, name), stream(client, name))
    assert first.accepted.generation_id == second.accepted.generation_id
    return second


KINDS: tuple[Callable[[SluiceClient, str], Coroutine[Any, Any, Reader]], ...] = (
    stream,
    stream_unstored,
    leave,
    cancel,
    expire,
    repeat,
)


def not_kept(stack: RunningStack) -> list[str]:
    with Redis.from_url(stack.local.valkey.url, decode_responses=True) as redis:
        return [key for key in redis.keys("*") if not KEPT.fullmatch(key)]


async def test_nothing_is_left_but_what_the_policy_keeps(brief: RunningStack) -> None:
    async with brief.client() as client:
        asked = [asyncio.create_task(ask(client, f"{ask.__name__}-{n}")) for n in range(ROUNDS) for ask in KINDS]
        by_kind = dict(zip((ask.__name__ for ask in KINDS), await asyncio.gather(*asked), strict=False))

        async def is_clean() -> bool:
            unstored = brief.row("SELECT FROM generations WHERE NOT is_stored AND texts_deleted_at IS NULL")
            return unstored is None and not_kept(brief) == []

        await eventually(is_clean, what="no log, queue entry or reservation is left")
        assert brief.row(
            "SELECT count(*) AS rows, count(*) FILTER (WHERE prompt_token_ids = '') AS emptied,"
            " count(*) FILTER (WHERE state IN ('QUEUED', 'RUNNING')) AS live FROM generations"
        ) == {"rows": ROUNDS * len(KINDS), "emptied": ROUNDS, "live": 0}
        assert brief.row("SELECT count(*) AS rows FROM usage_ledger") == {"rows": ROUNDS * len(KINDS)}

        again = Reader(client.stream(generation_id=by_kind["stream"].accepted.generation_id))
        await again.until_end()
        assert again.token_ids == by_kind["stream"].token_ids, "replayed from the record"
        await refuse(client, by_kind["stream_unstored"])

        report = await asyncio.to_thread(drop_partitions, brief.local.dsn, datetime.now(UTC) + 3 * DAY, kept=DAY)
        assert f"generations_p{datetime.now(UTC):%Y%m%d}" in report.dropped
        assert brief.row("SELECT FROM generations") is None
        assert brief.row("SELECT count(*) AS rows FROM usage_ledger") == {"rows": ROUNDS * len(KINDS)}
        await refuse(client, by_kind["stream"])


async def refuse(client: SluiceClient, reader: Reader) -> None:
    """A cursor on what is no longer kept."""
    generation_id = reader.accepted.generation_id
    late = Reader(client.stream(generation_id=generation_id, cursor=reader.cursor))
    with pytest.raises(OutOfRangeError) as caught:
        await late.until_end()
    assert caught.value.reason == Reason.OUTPUT_NOT_KEPT
