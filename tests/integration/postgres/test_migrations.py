from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from uuid import UUID

import psycopg
import pytest
from alembic import command
from psycopg.rows import dict_row

from service_kit.ids import new_generation_id
from sluice.local.postgres import LocalPostgres
from state_store.errors import StoreUnavailableError
from state_store.postgres.migrate import (
    alembic_config,
    current_revision,
    downgrade,
    head_revision,
    upgrade,
    wait_for_schema,
    wait_for_server,
)
from state_store.postgres.partitions import ensure_partitions, lowest_id
from state_store.postgres.rows import chunk, pack_texts, pack_token_ids, to_signed
from state_store.postgres.statements import READ_OUTPUT
from state_store.postgres.store import PostgresStore
from tests.support.generations import new_generation, output

DAY = timedelta(days=1)


def relations(dsn: str) -> set[str]:
    with psycopg.connect(dsn) as connection:
        found = connection.execute("SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace")
        return {name for (name,) in found}


def partition_of_row(dsn: str, generation_id: str) -> str:
    with psycopg.connect(dsn) as connection:
        query = "SELECT tableoid::regclass::text FROM generations WHERE generation_id = %s"
        row = connection.execute(query, (generation_id,)).fetchone()
        assert row is not None
        return row[0]


def test_the_migrations_amount_to_the_declared_schema(store_dsn: str) -> None:
    command.check(alembic_config(store_dsn))


def test_the_schema_goes_up_down_and_up_again(postgres_server: LocalPostgres) -> None:
    dsn = postgres_server.create_database("up_down_up")
    assert current_revision(dsn) is None
    upgrade(dsn)
    first = relations(dsn)
    upgrade(dsn)
    assert current_revision(dsn) == head_revision()
    downgrade(dsn, "base")
    assert relations(dsn) == {"alembic_version", "alembic_version_pkc"}
    assert current_revision(dsn) is None
    upgrade(dsn)
    assert relations(dsn) == first


def test_output_stored_before_there_were_log_probabilities_is_read(postgres_server: LocalPostgres) -> None:
    dsn = postgres_server.create_database("before_logprobs")
    command.upgrade(alembic_config(dsn), "0001")
    generation_id = new_generation_id()
    delta = output(3)
    packed, ends = pack_texts(delta.texts)
    with psycopg.connect(dsn) as connection:
        connection.execute(
            "INSERT INTO chunks VALUES (%s, 1, 3, %s, %s, %s, 0, %s)",
            (generation_id, pack_token_ids(delta.token_ids), packed, ends, to_signed(delta.chain)),
        )
    upgrade(dsn)
    with psycopg.connect(dsn, row_factory=dict_row) as connection:
        row = connection.execute(READ_OUTPUT, {"generation_ids": [generation_id]}).fetchone()
    assert row is not None
    assert chunk(row) == delta


def test_waiting_ends_when_the_schema_is_there_and_refuses_when_it_stays_away(postgres_server: LocalPostgres) -> None:
    dsn = postgres_server.create_database("awaited")
    with pytest.raises(StoreUnavailableError, match="the schema is at None"):
        wait_for_schema(dsn, timedelta(0))
    wait_for_server(dsn, timedelta(0))
    upgrade(dsn)
    wait_for_schema(dsn, timedelta(0))
    nowhere = "postgresql://sluice@127.0.0.1:1/none"
    for wait in (wait_for_schema, wait_for_server):
        with pytest.raises(StoreUnavailableError, match="cannot be reached"):
            wait(nowhere, timedelta(0))


def test_a_generation_lies_in_the_partition_of_its_day(store_dsn: str) -> None:
    generation_id = new_generation_id()
    created = datetime.fromtimestamp((UUID(generation_id).int >> 80) / 1000, UTC)
    _insert(store_dsn, generation_id)
    assert partition_of_row(store_dsn, generation_id) == f"generations_p{created:%Y%m%d}"


def test_the_bounds_of_a_partition_are_the_time_bits_of_its_day() -> None:
    day = datetime(2026, 11, 29, tzinfo=UTC)
    low, high = lowest_id(day), lowest_id(day + DAY)
    assert str(low) == f"{int(day.timestamp() * 1000):012x}"[:8] + "-" + f"{int(day.timestamp() * 1000):012x}"[8:] + (
        "-0000-0000-000000000000"
    )
    assert (high.int - low.int) >> 80 == 24 * 3600 * 1000


def test_missing_partitions_are_created_once_and_only_those(store_dsn: str) -> None:
    later = datetime.now(UTC) + 30 * DAY
    created = ensure_partitions(store_dsn, later, days_ahead=1)
    days = [f"{later:%Y%m%d}", f"{later + DAY:%Y%m%d}"]
    assert created == [f"{table}_p{day}" for table in ("generations", "attempts", "chunks") for day in days]
    assert ensure_partitions(store_dsn, later, days_ahead=1) == []
    assert set(created) <= relations(store_dsn)
    command.check(alembic_config(store_dsn))


def test_a_day_that_began_in_the_default_partition_stays_there(store_dsn: str) -> None:
    later = datetime.now(UTC) + 60 * DAY
    generation_id = str(UUID(int=lowest_id(later).int | (7 << 76) | (2 << 62)))
    _insert(store_dsn, generation_id)
    assert partition_of_row(store_dsn, generation_id) == "generations_default"
    created = ensure_partitions(store_dsn, later, days_ahead=1)
    assert f"generations_p{later:%Y%m%d}" not in created
    assert f"generations_p{later + DAY:%Y%m%d}" in created


async def test_a_full_life_works_in_the_default_partition(make_store_dsn: Callable[[], str]) -> None:
    store = PostgresStore(make_store_dsn())
    await store.open()
    old = str(UUID(int=lowest_id(datetime(2020, 1, 1, tzinfo=UTC)).int | (7 << 76) | (2 << 62)))
    [result] = await store.submit_many([new_generation(generation_id=old)])
    assert await store.get_many([result.record.generation_id]) == [result.record]
    await store.close()


def _insert(dsn: str, generation_id: str) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute(
            "INSERT INTO generations (generation_id, tenant_id, key_id, request_id, model, model_revision, model_precision,"
            " priority_class, state, prompt_token_ids, sampling, traceparent, created_at, queued_at, queue_deadline_at)"
            " VALUES (%s, 't', 'k', 'r', 'm', '1', 'fp32', 'BATCH', 'QUEUED', '', '{}', '', now(), now(), now())",
            (generation_id,),
        )
