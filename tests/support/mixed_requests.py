"""Requests of every kind, and what must be left of them once the retention periods are over."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from redis import Redis

from service_kit.errors import ExpiredError, OutOfRangeError, Reason
from sluice.client import SluiceClient
from sluice.client_events import Sampling
from state_store.postgres.partitions import drop_partitions
from tests.support.reader import Reader
from tests.support.stack import MODEL, RunningStack, eventually, running_stack

DAY = timedelta(days=1)
SHORT, LONG = Sampling(max_output_tokens=20, seed=7), Sampling(max_output_tokens=3000, seed=7, ignore_eos=True)
KEPT = re.compile(
    r"log:\{s0\}:kept_since|queue:(marker|models)|\{q:[^}]*\}:(marker|meta|idle_counters)"
    r"|\{quota:\d+\}:(marker|settled|(requests|tokens|use):.*)"
)
"""Markers, and counts of tenants that no request is in: what came of all requests together, not of one."""
_SHOWN = 20


@contextmanager
def brief_stack(*, kept_s: int, overrides: dict[str, str] | None = None) -> Iterator[RunningStack]:
    """A stack whose logs are kept only for as long as a reader may lag behind, on a busy machine too."""
    with running_stack(tokens_per_s=200.0, overrides={"SLUICE_LOG_KEPT_S": str(kept_s), **(overrides or {})}) as stack:
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
    """While it runs, or while it waits where the machine is busy."""
    soon = timedelta(milliseconds=300)
    reader = Reader(client.generate(MODEL, name, sampling=LONG, request_id=name, deadline=soon))
    try:
        await reader.until_end()
    except ExpiredError:
        return reader
    raise AssertionError("it outlived its deadline")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Counts of the durable record: `emptied` have lost their texts, `live` are not over, `ledger` were charged."""

    generations: int
    emptied: int
    live: int
    ledger: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Remains:
    """What `send_and_forget` found. `replay_faults` and `refusal_faults` name requests that were answered otherwise than
    the policy says: a stored one with its output, one that is no longer kept with OUT_OF_RANGE."""

    expected: Rows
    rows: Rows
    rows_after_drop: Rows
    sent_in_s: float
    clean_after_s: float
    left: list[str] = field(default_factory=list)
    replay_faults: list[str] = field(default_factory=list)
    refusal_faults: list[str] = field(default_factory=list)

    @property
    def expected_after_drop(self) -> Rows:
        """What was charged is kept for longer than the rows are."""
        return replace(self.expected, generations=0, emptied=0)


async def send_and_forget(
    stack: RunningStack, *, num_requests: int, at_once: int, checked: int, timeout_s: float = 60.0
) -> Remains:
    """Sends the requests, the kinds in turn, and waits for the retention periods; then the day of the rows is over too.
    `checked` of the streamed ones of each kind are asked for again."""
    kinds = [KINDS[number % len(KINDS)] for number in range(num_requests)]
    async with stack.client() as client:
        began_s = time.monotonic()
        readers = await _send(client, kinds, at_once)
        sent_s = time.monotonic()
        left = await _wait_until_clean(stack, timeout_s)
        clean_s = time.monotonic()
        by_kind = {
            wanted: [reader for reader, kind in zip(readers, kinds, strict=True) if kind is wanted] for wanted in KINDS
        }
        stored, unstored = by_kind[stream][-checked:], by_kind[stream_unstored][-checked:]
        rows = _rows(stack)
        replay_faults = [fault for reader in stored if (fault := await _replay_fault(client, reader))]
        refusal_faults = [fault for reader in unstored if (fault := await _refusal_fault(client, reader))]
        await asyncio.to_thread(drop_partitions, stack.local.dsn, datetime.now(UTC) + 3 * DAY, kept=DAY)
        refusal_faults += [fault for reader in stored if (fault := await _refusal_fault(client, reader))]
    numbers = Counter(kinds)
    return Remains(
        expected=Rows(generations=num_requests, emptied=numbers[stream_unstored], live=0, ledger=num_requests),
        rows=rows,
        rows_after_drop=_rows(stack),
        sent_in_s=sent_s - began_s,
        clean_after_s=clean_s - sent_s,
        left=left,
        replay_faults=replay_faults,
        refusal_faults=refusal_faults,
    )


async def _send(
    client: SluiceClient, kinds: list[Callable[[SluiceClient, str], Coroutine[Any, Any, Reader]]], at_once: int
) -> list[Reader]:
    turns = asyncio.Semaphore(at_once)

    async def send(number: int) -> Reader:
        async with turns:
            return await kinds[number](client, f"{kinds[number].__name__}-{number}")

    async with asyncio.TaskGroup() as tasks:
        sent = [tasks.create_task(send(number)) for number in range(len(kinds))]
    return [each.result() for each in sent]


async def _wait_until_clean(stack: RunningStack, timeout_s: float) -> list[str]:
    """What is left when nothing more is, or after the time."""

    async def is_clean() -> bool:
        return not await asyncio.to_thread(left_over, stack)

    try:
        await eventually(is_clean, what="nothing is left", timeout_s=timeout_s)
    except AssertionError:
        return left_over(stack)
    return []


def left_over(stack: RunningStack) -> list[str]:
    """The keys that belong to a request, with what they hold, and the rows whose texts were to be deleted."""
    row = stack.row("SELECT count(*) AS rows FROM generations WHERE NOT is_stored AND texts_deleted_at IS NULL")
    unstored = row["rows"] if row else 0
    with Redis.from_url(stack.local.valkey.url, decode_responses=True) as redis:
        keys = sorted(key for key in redis.scan_iter(count=1000) if not KEPT.fullmatch(key))
        shown = [f"{key} ({redis.type(key)}, kept {redis.pttl(key)} ms, {_state(stack, key)})" for key in keys[:_SHOWN]]
    return [*shown, *keys[_SHOWN:], *(f"texts of {unstored} rows" for _ in range(min(1, unstored)))]


def _state(stack: RunningStack, key: str) -> str:
    """Of the generation that a key names."""
    found = re.search(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", key)
    row = found and stack.row("SELECT state, request_id FROM generations WHERE generation_id = %s", found[0])
    return f"{row['state']} {row['request_id']}" if row else "no row"


def _rows(stack: RunningStack) -> Rows:
    counts = stack.row(
        "SELECT count(*) AS generations, count(*) FILTER (WHERE prompt_token_ids = '') AS emptied,"
        " count(*) FILTER (WHERE state IN ('QUEUED', 'RUNNING')) AS live,"
        " (SELECT count(*) FROM usage_ledger) AS ledger FROM generations"
    )
    assert counts is not None
    return Rows(**counts)


async def _replay_fault(client: SluiceClient, reader: Reader) -> str:
    """From the record: the log is gone."""
    again = Reader(client.stream(generation_id=reader.accepted.generation_id))
    await again.until_end()
    return "" if again.token_ids == reader.token_ids else f"{reader.accepted.generation_id}: other tokens than before"


async def _refusal_fault(client: SluiceClient, reader: Reader) -> str:
    """A cursor on what is no longer kept."""
    generation_id = reader.accepted.generation_id
    late = Reader(client.stream(generation_id=generation_id, cursor=reader.cursor))
    try:
        await late.until_end()
    except OutOfRangeError as error:
        return "" if error.reason == Reason.OUTPUT_NOT_KEPT else f"{generation_id}: refused with {error.reason}"
    return f"{generation_id}: answered"
