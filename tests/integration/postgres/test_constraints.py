"""The database refuses what the transition table does not allow, whoever writes."""

import psycopg
import pytest
from psycopg import errors

from state_store.model import State
from state_store.postgres.store import PostgresStore
from state_store.tenant_changes import LIMIT_NAMES
from state_store.transitions import MAX_ATTEMPTS
from tests.support.generations import finish_of, granted, opened, output, running, submitted
from tests.support.tenants import new_key


@pytest.mark.parametrize(
    "change",
    [
        "state = 'PAUSED'",
        "state = 'RUNNING'",
        "state = 'SUCCEEDED'",
        "session_id = 'session'",
        "finished_at = now()",
        "finish_reason = 'STOP'",
        "error_reason = 'INTERNAL'",
        "output_tokens = 1",
        "output_tokens = -1, state = 'FAILED', finished_at = now()",
        "finish_reason = 'BORED', state = 'FAILED', finished_at = now()",
        "cancel_cause = 'BOREDOM'",
        "priority_class = 'FIRST'",
        "attempt = 1",
        "charged_attempts = 1",
        f"attempt = {MAX_ATTEMPTS + 1}, started_at = now()",
        "started_at = now()",
    ],
)
async def test_a_queued_row_refuses(emptied_postgres_store: PostgresStore, store_admin: str, change: str) -> None:
    await submitted(emptied_postgres_store)
    with psycopg.connect(store_admin) as connection, pytest.raises(errors.CheckViolation):
        connection.execute(f"UPDATE generations SET {change}")


@pytest.mark.parametrize("state", [state for state in State if state is not State.RUNNING])
async def test_a_running_row_cannot_leave_its_state_and_keep_its_session(
    emptied_postgres_store: PostgresStore, store_admin: str, state: State
) -> None:
    await running(emptied_postgres_store)
    with psycopg.connect(store_admin) as connection, pytest.raises(errors.CheckViolation):
        connection.execute("UPDATE generations SET state = %s", (state.value,))


async def test_a_generation_has_one_open_attempt(emptied_postgres_store: PostgresStore, store_admin: str) -> None:
    record = await running(emptied_postgres_store)
    with psycopg.connect(store_admin) as connection, pytest.raises(errors.UniqueViolation):
        connection.execute(
            "INSERT INTO attempts (generation_id, attempt, session_id, worker_id, nonce, granted_at)"
            " VALUES (%s, 2, 's', 'w', 0, now())",
            (record.generation_id,),
        )


async def test_a_generation_is_charged_once(emptied_postgres_store: PostgresStore, store_admin: str) -> None:
    record = await granted(
        emptied_postgres_store, await submitted(emptied_postgres_store), await opened(emptied_postgres_store)
    )
    await emptied_postgres_store.finish_many([finish_of(record, output=output(2), output_tokens=2)])
    with psycopg.connect(store_admin) as connection, pytest.raises(errors.UniqueViolation):
        connection.execute("INSERT INTO usage_ledger SELECT * FROM usage_ledger")


@pytest.mark.parametrize("change", ["token_ids = '\\x00'", "text_ends = '{1}'", "last_number = 9", "first_number = 0"])
async def test_a_chunk_has_one_id_and_one_text_per_token(
    emptied_postgres_store: PostgresStore, store_admin: str, change: str
) -> None:
    record = await running(emptied_postgres_store)
    await emptied_postgres_store.finish_many([finish_of(record, output=output(2), output_tokens=2)])
    with psycopg.connect(store_admin) as connection, pytest.raises(errors.CheckViolation):
        connection.execute(f"UPDATE chunks SET {change}")


@pytest.mark.parametrize(
    "change",
    ["weight = 0", "weight = 0.0009", "weight = 1000.1", "weight = 'NaN'", "max_class = 'FIRST'", "tokens_per_day = 0"],
)
async def test_a_tenant_refuses(emptied_postgres_store: PostgresStore, store_admin: str, change: str) -> None:
    await new_key(emptied_postgres_store, "tenant")
    with psycopg.connect(store_admin) as connection, pytest.raises(errors.CheckViolation):
        connection.execute(f"UPDATE tenants SET {change}")


@pytest.mark.parametrize("limit", LIMIT_NAMES)
async def test_a_key_refuses_a_limit_below_one(
    emptied_postgres_store: PostgresStore, store_admin: str, limit: str
) -> None:
    await new_key(emptied_postgres_store, "tenant")
    with psycopg.connect(store_admin) as connection:
        connection.execute(f"UPDATE api_keys SET {limit} = 1")
        with pytest.raises(errors.CheckViolation):
            connection.execute(f"UPDATE api_keys SET {limit} = 0")
