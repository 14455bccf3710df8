"""The harness's own view of Postgres: the rows of a trial, and witnesses that write down what no row keeps.

The witnesses are triggers. One notes at the commit of every grant who granted and who owned the session at that moment; it
is deferred, so that it sees what stood there when the transaction ended. One notes writes to final rows. They only observe.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import DictRow, dict_row

from state_store.postgres.rows import to_unsigned, unpack_texts, unpack_token_ids
from tests.chaos.history import AttemptRow, ChunkRow, GenerationRow, GrantRow, LedgerRow

Connection = psycopg.AsyncConnection[DictRow]

_WITNESSES = """
CREATE TABLE chaos_grants (
    generation_id uuid, attempt int, session_id text, granter text, owner text, owner_epoch bigint, session_state text
);
CREATE INDEX ON chaos_grants (generation_id);
CREATE TABLE chaos_changes (generation_id uuid);
CREATE FUNCTION chaos_note_grant() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO chaos_grants
    SELECT NEW.generation_id, NEW.attempt, NEW.session_id, session_user, s.scheduler_id, s.owner_epoch, s.state
    FROM worker_sessions s WHERE s.session_id = NEW.session_id;
    RETURN NULL;
END $$;
CREATE FUNCTION chaos_note_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO chaos_changes VALUES (NEW.generation_id);
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER chaos_grant AFTER INSERT ON attempts DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION chaos_note_grant();
CREATE TRIGGER chaos_change AFTER UPDATE ON generations FOR EACH ROW
    WHEN (OLD.state NOT IN ('QUEUED', 'RUNNING')) EXECUTE FUNCTION chaos_note_change();
"""


def install_witnesses(dsn: str, users: dict[str, str]) -> None:
    """Triggers, and one database user per process (name → password), so that a witness knows who writes."""
    with psycopg.connect(dsn) as connection:
        connection.execute(_WITNESSES)
        for name, password in users.items():
            statement = sql.SQL("CREATE ROLE {} LOGIN SUPERUSER PASSWORD {}")
            connection.execute(statement.format(sql.Identifier(name), sql.Literal(password)))


class Rows:
    """Everything that Postgres says about the requests of a trial. `raw` is for the report."""

    def __init__(self, raw: dict[str, list[dict[str, Any]]]) -> None:
        self.raw = raw

    @property
    def generations(self) -> tuple[GenerationRow, ...]:
        return tuple(
            GenerationRow(
                generation_id=str(row["generation_id"]),
                request_id=row["request_id"],
                state=row["state"],
                attempt=row["attempt"],
                prompt_token_ids=unpack_token_ids(row["prompt_token_ids"]),
                seed=row["sampling"]["seed"],
                temperature=row["sampling"]["temperature"],
                finish_reason=row["finish_reason"],
                error_reason=row["error_reason"],
                output_tokens=row["output_tokens"],
            )
            for row in self.raw["generations"]
        )

    @property
    def attempts(self) -> tuple[AttemptRow, ...]:
        return tuple(
            AttemptRow(
                generation_id=str(row["generation_id"]),
                attempt=row["attempt"],
                session_id=row["session_id"],
                nonce=to_unsigned(row["nonce"]),
                outcome=row["outcome"],
                end_position=row["end_position"],
            )
            for row in self.raw["attempts"]
        )

    @property
    def chunks(self) -> tuple[ChunkRow, ...]:
        return tuple(
            ChunkRow(
                generation_id=str(row["generation_id"]),
                first=row["first_number"],
                token_ids=unpack_token_ids(row["token_ids"]),
                texts=unpack_texts(row["text"], row["text_ends"]),
                prev_chain=to_unsigned(row["prev_chain"]),
                chain=to_unsigned(row["chain"]),
            )
            for row in self.raw["chunks"]
        )

    @property
    def ledger(self) -> tuple[LedgerRow, ...]:
        return tuple(
            LedgerRow(
                generation_id=str(row["generation_id"]),
                state=row["state"],
                prompt_tokens=row["prompt_tokens"],
                output_tokens=row["output_tokens"],
            )
            for row in self.raw["usage_ledger"]
        )

    @property
    def grants(self) -> tuple[GrantRow, ...]:
        return tuple(
            GrantRow(
                generation_id=str(row["generation_id"]),
                attempt=row["attempt"],
                session_id=row["session_id"],
                granter=row["granter"],
                owner=row["owner"],
                owner_epoch=row["owner_epoch"],
                session_state=row["session_state"],
            )
            for row in self.raw["chaos_grants"]
        )

    @property
    def changed_after_end(self) -> tuple[str, ...]:
        return tuple(sorted({str(row["generation_id"]) for row in self.raw["chaos_changes"]}))


_TABLES = ("attempts", "chunks", "usage_ledger", "chaos_grants", "chaos_changes", "dead_letters")


@asynccontextmanager
async def connect(dsn: str) -> AsyncIterator[Connection]:
    """Past all links; every statement is its own transaction."""
    async with await psycopg.AsyncConnection.connect(dsn, row_factory=dict_row, autocommit=True) as connection:
        yield connection


async def fetch(connection: Connection, query: sql.SQL | sql.Composed | str, *parameters: Any) -> list[dict[str, Any]]:
    return await (await connection.execute(query, parameters)).fetchall()


async def read_rows(connection: Connection, request_prefix: str) -> Rows:
    """All rows of the requests whose id begins so."""
    raw: dict[str, list[dict[str, Any]]] = {}
    statement = "SELECT * FROM generations WHERE starts_with(request_id, %s) ORDER BY generation_id"
    raw["generations"] = await fetch(connection, statement, request_prefix)
    ids = [row["generation_id"] for row in raw["generations"]]
    for table in _TABLES:
        query = sql.SQL("SELECT * FROM {} WHERE generation_id = ANY(%s)").format(sql.Identifier(table))
        raw[table] = await fetch(connection, query, ids)
    raw["worker_sessions"] = await fetch(connection, "SELECT * FROM worker_sessions ORDER BY session_id")
    return Rows(raw)


async def is_all_over(connection: Connection, request_prefix: str) -> bool:
    """Whether every request whose id begins so has a final row."""
    query = (
        "SELECT count(*) AS live FROM generations WHERE starts_with(request_id, %s) AND state IN ('QUEUED', 'RUNNING')"
    )
    return bool((await fetch(connection, query, request_prefix))[0]["live"] == 0)


async def old_transactions(connection: Connection, seconds: float) -> list[dict[str, Any]]:
    """Transactions that have been open for so long: what a takeover may be waiting for."""
    query = (
        "SELECT usename, state, wait_event_type, wait_event, round(extract(epoch FROM now() - xact_start), 1) AS age_s,"
        " round(extract(epoch FROM now() - state_change), 1) AS state_age_s, left(query, 80) AS query"
        " FROM pg_stat_activity WHERE xact_start < now() - make_interval(secs => %s)"
    )
    return await fetch(connection, query, seconds)


_SWEEP = {
    "a generation that is not over": "SELECT generation_id FROM generations WHERE state IN ('QUEUED', 'RUNNING')",
    "a final generation without ledger row": "SELECT generation_id FROM generations WHERE state NOT IN ('QUEUED', 'RUNNING')"
    " EXCEPT SELECT generation_id FROM usage_ledger",
    "a ledger row without generation": "SELECT generation_id FROM usage_ledger EXCEPT SELECT generation_id FROM generations",
    "a final row written again": "SELECT generation_id FROM chaos_changes",
    "a request key without generation": "SELECT generation_id FROM request_keys EXCEPT SELECT generation_id FROM generations",
}


async def sweep(connection: Connection) -> list[str]:
    """What is wrong in the whole database, after all trials."""
    return [
        f"{what}: {row['generation_id']}" for what, query in _SWEEP.items() for row in await fetch(connection, query)
    ]
