"""`sluice generations`, `sluice workers` and `sluice queue` on real servers."""

import asyncio
import csv
import io
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import pytest
from redis.asyncio import Redis
from typer.testing import CliRunner

from scheduler.policy import queue_entry_of
from scheduler.queue.redis_queue import RedisAdmissionQueue
from scheduler.redis_cancel_hints import CHANNEL, RedisCancelHints
from service_kit.delta import Cursor
from service_kit.ids import GenerationId, SessionId, TenantId, new_generation_id
from sluice.__main__ import build_app
from sluice.errors import UserError
from sluice.local.valkey import LocalValkey
from state_store.delta_log.connection import connect_redis
from state_store.delta_log.port import AppendItem, OpenItem
from state_store.delta_log.redis_log import RedisDeltaLog
from state_store.model import AttemptOutcome, CancelCause, GenerationRecord, PriorityClass, State
from state_store.ports import AttemptEnd
from state_store.postgres.store import PostgresStore
from tests.support.delta_logs import database_url, delta_after
from tests.support.generations import (
    LEASE,
    end_of_queued,
    finish_of,
    grant_request,
    new_generation,
    new_session,
    output,
    requeued,
)
from tests.support.polling import eventually_answers

TOOLS_DATABASE = 9
A, B = TenantId("tenant-a"), TenantId("tenant-b")
WORDS = "é3"
"""Of the output of `finished`."""
PROMPT = (71_717, 81_818)
T = TypeVar("T")


class Tools:
    """The command line on a database and a Valkey that hold a generation of each kind."""

    def __init__(self, dsn: str, redis_url: str) -> None:
        self.dsn, self.redis_url = dsn, redis_url
        asyncio.run(self._with(self._fill))

    async def _with(self, work: Callable[[PostgresStore, Redis], Awaitable[T]]) -> T:
        store, redis = PostgresStore(self.dsn), connect_redis(self.redis_url)
        await store.open()
        try:
            return await work(store, redis)
        finally:
            await redis.aclose()
            await store.close()

    async def _fill(self, store: PostgresStore, redis: Redis) -> None:
        await redis.flushdb()
        self.session, self.lost = await _session(store, "worker-7"), await _session(store, "worker-6")
        ran = await _grant(store, await _submit(store, tenant_id=A, prompt_token_ids=PROMPT), self.lost)
        await requeued(store, ran)
        end = AttemptEnd(
            generation_id=ran.generation_id,
            attempt=1,
            outcome=AttemptOutcome.SESSION_LOST,
            end_position=1,
            is_charged=True,
        )
        await store.record_attempt_ends([end])
        [again] = await store.get_many([ran.generation_id])
        assert again is not None
        again = await _grant(store, again, self.session)
        [result] = await store.finish_many([finish_of(again, output=output(4), output_tokens=4)])
        assert result.record is not None
        self.finished = result.record
        await store.lose_session(self.lost, 1)
        self.queued = await _submit(store, tenant_id=B, priority_class=PriorityClass.BATCH)
        self.running = await _grant(store, await _submit(store, tenant_id=B, model="other"), self.session)
        log = RedisDeltaLog(redis)
        await log.open_many([OpenItem(generation_id=self.running.generation_id, attempt=1)])
        await log.append_many(
            [AppendItem(generation_id=self.running.generation_id, attempt=1, delta=delta_after(Cursor(), 1, 2))]
        )
        queue = RedisAdmissionQueue(redis)
        await queue.mark_ready()
        await queue.enqueue_many([queue_entry_of(self.queued, weight=1.0)])

    def run(self, *arguments: str) -> Any:
        servers = ("--dsn", self.dsn)
        if arguments[0] == "queue" or "cancel" in arguments or "--text" in arguments:
            servers += ("--redis-url", self.redis_url)
        return CliRunner().invoke(build_app([arguments[0]]), [*arguments, *servers])

    def json(self, *arguments: str) -> Any:
        result = self.run(*arguments, "--format", "json")
        assert result.exit_code == 0, (result.output, result.exception)
        return json.loads(result.stdout)

    def listed(self, *arguments: str) -> list[str]:
        return [row["generation_id"] for row in self.json("generations", "list", *arguments)]


async def _session(store: PostgresStore, worker_id: str) -> SessionId:
    session = new_session(worker_id=worker_id)
    await store.open_session(session, lease=LEASE)
    return session.session_id


async def _submit(store: PostgresStore, **fields: Any) -> GenerationRecord:
    [result] = await store.submit_many([new_generation(**fields)])
    return result.record


async def _grant(store: PostgresStore, record: GenerationRecord, session_id: SessionId) -> GenerationRecord:
    [result] = await store.grant_many([grant_request(record, session_id)])
    assert result.record is not None
    return result.record


@pytest.fixture(scope="module")
def tools(make_store_dsn: Callable[[], str], valkey_server: LocalValkey) -> Tools:
    return Tools(make_store_dsn(), database_url(valkey_server.url, TOOLS_DATABASE))


def test_generations_are_listed_newest_first_and_by_every_filter(tools: Tools) -> None:
    finished, queued, running = (record.generation_id for record in (tools.finished, tools.queued, tools.running))
    assert tools.listed() == [running, queued, finished]
    assert tools.listed("--limit", "1") == [running]
    assert tools.listed("--tenant", "tenant-a") == [finished]
    assert tools.listed("--state", "queued", "--state", "running") == [running, queued]
    assert tools.listed("--model", "other") == [running]
    assert tools.listed("--class", "batch") == [queued]
    assert tools.listed("--since", "1h") == [running, queued, finished]
    assert tools.listed("--since", (datetime.now(UTC) + timedelta(hours=1)).isoformat()) == []
    lines = tools.run("generations", "list", "--state", "succeeded").stdout.splitlines()
    assert lines[0].split()[:4] == ["GENERATION_ID", "TENANT", "MODEL", "CLASS"]
    assert lines[1].split()[:7] == [finished, "tenant-a", "tiny", "STANDARD", "SUCCEEDED", "2", "4"]
    rows = list(csv.DictReader(io.StringIO(tools.run("generations", "list", "--format", "csv").stdout)))
    assert [row["prompt_tokens"] for row in rows] == ["3", "3", "2"]
    assert tools.run("generations", "list", "--tenant", "nobody").stdout == ""


@pytest.mark.parametrize("option", [("--state", "sleeping"), ("--class", "first"), ("--since", "yesterday")])
def test_a_filter_that_means_nothing_is_refused_by_name(tools: Tools, option: tuple[str, str]) -> None:
    refused = tools.run("generations", "list", *option)
    assert isinstance(refused.exception, UserError)
    assert option[0] in str(refused.exception)


def test_a_generation_is_shown_with_the_timeline_of_its_attempts_and_without_texts(tools: Tools) -> None:
    shown = tools.json("generations", "show", tools.finished.generation_id)
    assert (shown["state"], shown["attempts"], shown["charged_attempts"]) == ("SUCCEEDED", 2, 1)
    assert (shown["prompt_tokens"], shown["output_tokens"], shown["finish_reason"]) == (2, 4, "STOP")
    events = [(e["event"], e["attempt"], e["worker"], e["position"], e["details"]) for e in shown["timeline"]]
    assert events == [
        ("ACCEPTED", None, None, None, None),
        ("GRANTED", 1, "worker-6", None, None),
        ("SESSION_LOST", 1, "worker-6", 1, "charged"),
        ("GRANTED", 2, "worker-7", None, None),
        ("FINISHED", 2, "worker-7", 4, None),
        ("SUCCEEDED", None, None, 4, "STOP"),
    ]
    assert sorted(event["after_s"] for event in shown["timeline"]) == [event["after_s"] for event in shown["timeline"]]
    for form in ("table", "csv", "json"):
        said = tools.run("generations", "show", tools.finished.generation_id, "--format", form).stdout
        assert tools.finished.request_id in said
        assert not any(text in said for text in (WORDS, json.dumps(WORDS)[1:-1], str(PROMPT[0])))


def test_texts_are_shown_where_they_are_asked_for(tools: Tools) -> None:
    finished = tools.json("generations", "show", tools.finished.generation_id, "--text")
    assert finished["output"] == output(4).text
    assert finished["prompt_token_ids"] == list(map(str, PROMPT))
    table = tools.run("generations", "show", tools.finished.generation_id, "--text").stdout
    assert r"é0\x00é3" in table, "without control characters"
    running = tools.json("generations", "show", tools.running.generation_id, "--text")
    assert running["output"] == "<1><2>", "of a live one what the log has"


@pytest.mark.parametrize("command", ["show", "cancel"])
@pytest.mark.parametrize("unknown", [new_generation_id(), "nonsense"])
def test_an_unknown_generation_is_refused(tools: Tools, command: str, unknown: str) -> None:
    refused = tools.run("generations", command, unknown)
    assert isinstance(refused.exception, UserError)
    assert f"there is no generation {unknown}" in str(refused.exception)


def test_workers_are_listed_with_their_lease_and_load(tools: Tools) -> None:
    [live] = tools.json("workers")
    assert (live["worker"], live["session_id"], live["state"], live["running"]) == (
        "worker-7",
        tools.session,
        "LIVE",
        1,
    )
    assert (live["model"], live["scheduler"], live["owner_epoch"], live["max_running"]) == ("tiny", "scheduler-1", 1, 8)
    assert live["lease_s"] <= LEASE.total_seconds()
    both = {row["session_id"]: row for row in tools.json("workers", "--all")}
    assert (both[tools.lost]["state"], both[tools.lost]["lease_s"], both[tools.lost]["running"]) == ("LOST", None, 0)
    assert tools.json("workers", "--model", "another") == []
    assert tools.run("workers").stdout.splitlines()[0].split()[:4] == ["WORKER", "SESSION_ID", "STATE", "MODEL"]


def test_the_queue_shows_depth_by_model_and_class_beside_the_record(tools: Tools) -> None:
    rows = {row["class"]: row for row in tools.json("queue")}
    assert rows.keys() == {"all", "BATCH"}
    for row in rows.values():
        assert (row["model"], row["queued"], row["prompt_tokens"], row["committed"]) == ("tiny", 1, 3, 1)
        assert 0 <= row["oldest_s"] < 600
    assert (rows["all"]["delayed"], rows["all"]["in_flight"], rows["all"]["tenants"]) == (0, 0, 1)
    assert tools.json("queue", "--model", "another") == []
    assert tools.run("queue").stdout.splitlines()[0].split()[:3] == ["MODEL", "CLASS", "QUEUED"]


def test_a_cancel_is_recorded_told_to_the_schedulers_and_waited_for(tools: Tools) -> None:
    wanted = [tools.queued.generation_id, tools.finished.generation_id]
    told: list[GenerationId] = []

    async def obey(store: PostgresStore, redis: Redis) -> None:
        """What a scheduler does when it hears of it."""

        async def is_heard() -> bool:
            return (await redis.pubsub_numsub(CHANNEL))[0][1] > 0

        hints = RedisCancelHints(redis).follow()
        async with asyncio.timeout(20):
            hearing = asyncio.ensure_future(anext(hints))
            await eventually_answers(is_heard)
            command = asyncio.create_task(asyncio.to_thread(tools.run, "generations", "cancel", *wanted))
            told.extend(await hearing)
        [record] = await store.get_many([tools.queued.generation_id])
        assert record is not None
        assert record.cancel_cause is CancelCause.CLIENT
        await store.finish_many([end_of_queued(record)])
        result = await command
        await hints.aclose()
        assert result.exit_code == 0, result.output
        assert [line.split()[4] for line in result.stdout.splitlines()[1:]] == ["CANCELLED", "SUCCEEDED"]

    asyncio.run(tools._with(obey))
    assert told == wanted


def test_a_cancel_that_nobody_heard_yet_exits_with_1(tools: Tools) -> None:
    result = tools.run("generations", "cancel", tools.running.generation_id, "--wait", "0")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[1].split()[4] == State.RUNNING
