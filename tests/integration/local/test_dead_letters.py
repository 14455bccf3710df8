"""`sluice dead-letters` on a real database."""

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from typer.testing import CliRunner

from service_kit.errors import Reason
from service_kit.ids import GenerationId, TenantId, new_generation_id
from sluice.__main__ import build_app
from sluice.errors import UserError
from sluice.times import parse_since
from state_store.model import AttemptOutcome, GenerationRecord, State
from state_store.ports import AttemptEnd
from state_store.postgres.store import PostgresStore
from tests.support.generations import end_of_queued, granted, opened, requeued, submitted

HOUR = timedelta(hours=1)
_NOW = datetime.now(tz=UTC)


async def _bury(dsn: str) -> list[GenerationRecord]:
    """Two dead letters, of tenants a (two hours ago) and b (now), and a generation that lives."""
    store = PostgresStore(dsn)
    await store.open()
    try:
        dead = [
            await submitted(store, tenant_id=TenantId(name), is_stored=name == "tenant-a")
            for name in ("tenant-a", "tenant-b")
        ]
        for record, age in zip(dead, (2 * HOUR, 0 * HOUR), strict=True):
            run = await granted(store, record, await opened(store, worker_id="worker-7"))
            end = AttemptEnd(
                generation_id=run.generation_id,
                attempt=1,
                outcome=AttemptOutcome.SESSION_LOST,
                end_position=0,
                is_charged=True,
            )
            await store.record_attempt_ends([end])
            queued = await requeued(store, run)
            failure = end_of_queued(
                queued, state=State.FAILED, error_reason=Reason.ATTEMPTS_EXHAUSTED, error_message="given up"
            )
            await store.finish_many([failure], now=_NOW - age)
        return [*dead, await submitted(store)]
    finally:
        await store.close()


async def _find(dsn: str, generation_id: str) -> GenerationRecord:
    store = PostgresStore(dsn)
    await store.open()
    try:
        (record,) = await store.get_many([GenerationId(generation_id)])
        assert record is not None
        return record
    finally:
        await store.close()


class Commands:
    """The command line on one database."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.first, self.second, self.living = asyncio.run(_bury(dsn))

    def run(self, *arguments: str) -> Any:
        return CliRunner().invoke(build_app(["dead-letters"]), ["dead-letters", *arguments, "--dsn", self.dsn])

    def listed(self, *arguments: str) -> list[str]:
        result = self.run("list", "--json", *arguments)
        assert result.exit_code == 0, result.output
        return [letter["generation_id"] for letter in json.loads(result.stdout)]


@pytest.fixture
def commands(make_store_dsn: Callable[[], str]) -> Commands:
    return Commands(make_store_dsn())


def test_dead_letters_are_listed_newest_first_and_by_tenant_cause_and_time(commands: Commands) -> None:
    first, second = commands.first.generation_id, commands.second.generation_id
    assert commands.listed() == [second, first]
    assert commands.listed("--limit", "1") == [second]
    assert commands.listed("--tenant", "tenant-a") == [first]
    assert commands.listed("--since", "1h") == [second]
    assert commands.listed("--since", (_NOW - 3 * HOUR).isoformat()) == [second, first]
    assert commands.listed("--cause", "ATTEMPTS_EXHAUSTED", "--tenant", "tenant-b") == [second]
    assert commands.listed("--cause", "OTHER") == []
    lines = commands.run("list").stdout.splitlines()
    assert lines[0].split() == ["GENERATION", "TENANT", "CAUSE", "ATTEMPTS", "WORKERS", "DIED"]
    assert lines[1].split()[:5] == [second, "tenant-b", "ATTEMPTS_EXHAUSTED", "1", "worker-7"]
    nothing = commands.run("list", "--cause", "OTHER")
    assert (nothing.exit_code, nothing.stdout) == (0, "")


def test_a_dead_letter_is_shown_with_its_attempts_and_without_its_prompt(commands: Commands) -> None:
    shown = commands.run("show", commands.first.generation_id)
    assert shown.exit_code == 0
    assert "ATTEMPTS_EXHAUSTED: given up" in shown.stdout
    attempt = shown.stdout.splitlines()[-1].split()
    assert (attempt[0], attempt[1], attempt[-3:]) == ("1", "worker-7", ["SESSION_LOST", "0", "yes"])
    fields = json.loads(commands.run("show", commands.first.generation_id, "--json").stdout)
    assert fields["executions"][0]["outcome"] == "SESSION_LOST"
    assert fields["prompt_tokens"] == commands.first.num_prompt_tokens
    assert not {"prompt", "prompt_token_ids", "output"} & set(fields)


def test_a_requeue_is_a_new_generation_with_a_request_id_of_its_own(commands: Commands) -> None:
    dead = commands.first
    made = json.loads(commands.run("requeue", dead.generation_id, "--json").stdout)
    assert made["generation_id"] != dead.generation_id
    assert made["requeue_of"] == dead.generation_id
    new = asyncio.run(_find(commands.dsn, made["generation_id"]))
    assert (new.state, new.attempt, new.charged_attempts) == (State.QUEUED, 0, 0)
    assert new.request_id != dead.request_id
    assert (new.tenant_id, new.prompt_token_ids, new.sampling) == (dead.tenant_id, dead.prompt_token_ids, dead.sampling)
    assert new.grace is None, "nobody reads it yet"
    assert commands.listed() == [commands.second.generation_id, dead.generation_id]


def test_a_requeue_under_a_named_request_id_is_made_once_and_never_for_another_letter(commands: Commands) -> None:
    once = commands.run("requeue", commands.first.generation_id, "--request-id", "after-the-fix").stdout
    assert commands.run("requeue", commands.first.generation_id, "--request-id", "after-the-fix").stdout == once
    taken = commands.run("requeue", commands.first.generation_id, "--request-id", commands.first.request_id)
    assert isinstance(taken.exception, UserError)


def test_what_was_not_to_be_stored_is_run_again_like_that_and_not_without_its_prompt(commands: Commands) -> None:
    unstored = commands.second.generation_id
    made = json.loads(commands.run("requeue", unstored, "--json").stdout)
    assert not asyncio.run(_find(commands.dsn, made["generation_id"])).is_stored

    async def delete_texts() -> None:
        store = PostgresStore(commands.dsn)
        await store.open()
        await store.delete_texts_many([unstored])
        await store.close()

    asyncio.run(delete_texts())
    assert "its prompt was deleted" in str(commands.run("requeue", unstored).exception)
    assert commands.run("show", unstored).exit_code == 0


@pytest.mark.parametrize("command", ["show", "requeue"])
def test_what_is_no_dead_letter_is_refused_with_its_state(commands: Commands, command: str) -> None:
    living = commands.run(command, commands.living.generation_id)
    assert "is no dead letter: it is QUEUED" in str(living.exception)
    for unknown in (new_generation_id(), "nonsense"):
        assert "there is no such generation" in str(commands.run(command, unknown).exception)


def test_a_time_is_an_age_or_iso_8601_in_utc() -> None:
    assert parse_since("90s", _NOW) == _NOW - timedelta(seconds=90)
    assert parse_since("7d", _NOW) == _NOW - timedelta(days=7)
    assert parse_since("2026-01-31T12:00", _NOW) == datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert parse_since("2026-01-31T12:00+02:00", _NOW) == datetime(2026, 1, 31, 10, tzinfo=UTC)
    with pytest.raises(UserError, match="--since"):
        parse_since("yesterday", _NOW)
