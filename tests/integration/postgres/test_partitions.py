"""Days of old rows go with their partition: not before their time, and never in anybody's way."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from uuid import UUID

import psycopg
import pytest

from service_kit.ids import GenerationId
from state_store.model import GenerationRecord, State
from state_store.postgres.partitions import drop_partitions, ensure_partitions, lowest_id
from state_store.postgres.store import PostgresStore
from tests.support.generations import end_of_queued, finish_of, granted, new_generation, opened, output, state_of

DAY = timedelta(days=1)
NOW = datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0)
OLD = NOW - 10 * DAY
KEPT = 5 * DAY


def minted_on(day: datetime, number: int = 0) -> GenerationId:
    return GenerationId(str(UUID(int=lowest_id(day).int | (7 << 76) | (2 << 62) | number)))


def partitions_of(dsn: str, day: datetime) -> set[str]:
    with psycopg.connect(dsn) as connection:
        found = connection.execute(
            "SELECT relname FROM pg_class WHERE relkind = 'r' AND relname LIKE %s", (f"%p{day:%Y%m%d}",)
        )
        return {name for (name,) in found}


async def created(store: PostgresStore, generation_id: GenerationId, at: datetime) -> GenerationRecord:
    [result] = await store.submit_many([new_generation(generation_id=generation_id, deadline=None)], now=at)
    return result.record


async def lived(store: PostgresStore, generation_id: GenerationId, *, ended_at: datetime) -> GenerationRecord:
    """With an attempt, output and a ledger row."""
    running = await granted(store, await created(store, generation_id, ended_at), await opened(store))
    [result] = await store.finish_many([finish_of(running, output=output(2), output_tokens=2)], now=ended_at)
    assert result.record is not None
    return result.record


@pytest.fixture
def old_dsn(store_admin: str) -> str:
    """With partitions for two old days and the present ones."""
    ensure_partitions(store_admin, OLD, days_ahead=1)
    return store_admin


@pytest.fixture
def store(emptied_postgres_store: PostgresStore) -> PostgresStore:
    return emptied_postgres_store


async def test_a_day_goes_with_all_its_rows_when_its_time_is_over(old_dsn: str, store: PostgresStore) -> None:
    old = await lived(store, minted_on(OLD), ended_at=OLD)
    young = await lived(store, minted_on(NOW), ended_at=NOW)
    first, second = partitions_of(old_dsn, OLD), partitions_of(old_dsn, OLD + DAY)
    assert len(first) == len(second) == 3
    report = drop_partitions(old_dsn, NOW, kept=9 * DAY)
    assert (set(report.dropped), report.in_use, report.locked) == (first, (), ())
    assert partitions_of(old_dsn, OLD) == set()
    assert partitions_of(old_dsn, OLD + DAY) == second, "that day ended less than 9 days ago"
    assert await store.get_many([old.generation_id]) == [None]
    assert await store.read_output_many([old.generation_id]) == [None]
    assert await store.attempts_of(old.generation_id) == []
    assert len(await store.ledger_of(old.generation_id)) == 1, "usage is kept"
    assert await state_of(store, young) == young
    assert drop_partitions(old_dsn, NOW, kept=9 * DAY).dropped == ()


@pytest.mark.parametrize("is_running", [False, True])
async def test_a_day_stays_while_one_of_its_generations_lives(
    old_dsn: str, store: PostgresStore, is_running: bool
) -> None:
    record = await created(store, minted_on(OLD), OLD)
    if is_running:
        record = await granted(store, record, await opened(store))
    report = drop_partitions(old_dsn, NOW, kept=KEPT)
    assert report.in_use == (f"generations_p{OLD:%Y%m%d}",)
    assert len(partitions_of(old_dsn, OLD)) == 3
    assert await state_of(store, record) == record
    end = finish_of(record) if is_running else end_of_queued(record)
    await store.finish_many([end], now=NOW - 2 * DAY)
    assert f"generations_p{OLD:%Y%m%d}" in drop_partitions(old_dsn, NOW, kept=KEPT).dropped


async def test_a_day_stays_while_one_of_its_request_ids_is_in_force(old_dsn: str, store: PostgresStore) -> None:
    record = await lived(store, minted_on(OLD), ended_at=NOW)
    assert drop_partitions(old_dsn, NOW + DAY, kept=KEPT).in_use == (f"generations_p{OLD:%Y%m%d}",)
    found = await store.find_by_request_id(record.tenant_id, record.request_id)
    assert found == record
    later = NOW + DAY + timedelta(seconds=1)
    assert f"generations_p{OLD:%Y%m%d}" in drop_partitions(old_dsn, later, kept=KEPT).dropped


@contextmanager
def reading(dsn: str, table: str) -> Iterator[None]:
    """A transaction that has read the table and goes on."""
    with psycopg.connect(dsn) as connection:
        connection.execute(f"SELECT count(*) FROM {table}")
        yield


@pytest.mark.parametrize("table", ["generations", "attempts", "chunks"])
async def test_a_long_transaction_is_not_waited_for_and_the_next_round_goes_on(
    old_dsn: str, store: PostgresStore, table: str
) -> None:
    await lived(store, minted_on(OLD), ended_at=OLD)
    all_of_day = partitions_of(old_dsn, OLD)
    briefly = timedelta(milliseconds=1)
    with reading(old_dsn, table):
        blocked = drop_partitions(old_dsn, NOW, kept=9 * DAY, lock_timeout=briefly)
        assert blocked.locked == (f"{table}_p{OLD:%Y%m%d}",)
        assert f"generations_p{OLD:%Y%m%d}" not in blocked.dropped, "it names the day until all of it is gone"
    assert set(blocked.dropped) | set(drop_partitions(old_dsn, NOW, kept=9 * DAY).dropped) == all_of_day


async def test_creating_waits_for_no_long_transaction_either(old_dsn: str) -> None:
    later = NOW + 40 * DAY
    briefly = timedelta(milliseconds=1)
    with reading(old_dsn, "generations"):
        created = ensure_partitions(old_dsn, later, days_ahead=0, max_tries=1, lock_timeout=briefly)
        assert created == [f"{table}_p{later:%Y%m%d}" for table in ("attempts", "chunks")]
    assert ensure_partitions(old_dsn, later, days_ahead=0) == [f"generations_p{later:%Y%m%d}"]


async def test_old_rows_of_the_default_partition_go_in_batches(old_dsn: str, store: PostgresStore) -> None:
    very_old = OLD - 30 * DAY
    strays = [await lived(store, minted_on(very_old, number), ended_at=very_old) for number in range(3)]
    live = await created(store, minted_on(very_old, 9), very_old)
    counts = [drop_partitions(old_dsn, NOW, kept=KEPT, max_strays=2).deleted_strays for _ in range(3)]
    assert counts == [2, 1, 0]
    assert await store.get_many([record.generation_id for record in strays]) == [None] * 3
    assert await store.attempts_of(strays[0].generation_id) == []
    assert await store.read_output_many([strays[0].generation_id]) == [None]
    assert (await state_of(store, live)).state is State.QUEUED
