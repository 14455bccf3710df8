"""Tables with many ended generations over many days, filled by the server itself, and how statements are executed on them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
from psycopg import sql

from state_store.postgres.partitions import ensure_partitions

DAY = timedelta(days=1)
_PARTITIONED = re.compile(r"^(generations|attempts|chunks)_p\d{8}$")

# The time bits of an id and random ones behind them: what a UUIDv7 is, at any time.
_IDS = """
CREATE TEMP TABLE ids AS
SELECT (lpad(to_hex(%(low_ms)s + i::bigint * %(span_ms)s / %(rows)s), 12, '0') || '7' || substr(md5(i::text), 1, 3) || '8'
    || substr(md5(i::text), 4, 15))::uuid AS id, i
FROM generate_series(0, %(rows)s - 1) i
"""
_GENERATIONS = """
INSERT INTO generations (
    generation_id, tenant_id, key_id, request_id, model, model_revision, model_precision, priority_class, state, attempt,
    started_at, prompt_token_ids, sampling, traceparent, created_at, queued_at, queue_deadline_at, finished_at, output_tokens
)
SELECT id, 't' || i %% 50, 'k', 'r' || i, 'm', '1', 'fp32', 'BATCH', 'SUCCEEDED', 1, %(at)s, '\\x0000000000000000', '{}', '',
    %(at)s, %(at)s, %(at)s, %(at)s, 1
FROM ids
"""
_ATTEMPTS = "INSERT INTO attempts SELECT id, 1, 's', 'w', 0, %(at)s, %(at)s, 'FINISHED', 1, false FROM ids"
_CHUNKS = "INSERT INTO chunks SELECT id, 1, 1, '\\x00000000', '', '{0}', 0, 0 FROM ids"
_KEYS = "INSERT INTO request_keys SELECT 't' || i %% 50, %(prefix)s || i, id, '', %(at)s + interval '24 h' FROM ids"
_SESSIONS = """
INSERT INTO worker_sessions
SELECT 's' || i, 'w', 'a', 'x', 1, 'LOST', 'm', '1', 'fp32', 1, 1, 1, 1, now() FROM generate_series(1, 2000) i
"""


def add_day(dsn: str, day: datetime, rows: int, *, with_keys: bool = True) -> None:
    """`rows` ended generations of that day, each with an attempt, a chunk and a request key."""
    low = int(day.replace(hour=0, minute=0, second=0, microsecond=0).timestamp() * 1000)
    with psycopg.connect(dsn) as connection:
        connection.execute(_IDS, {"low_ms": low, "span_ms": int(DAY.total_seconds() * 1000), "rows": rows})
        for statement in (_GENERATIONS, _ATTEMPTS, _CHUNKS):
            connection.execute(statement, {"at": day})
        if with_keys:
            connection.execute(_KEYS, {"at": day, "prefix": f"{day:%Y%m%d}-"})


def fill(dsn: str, *, now: datetime, rows_by_age: Mapping[int, int], num_days: int) -> None:
    """Partitions from `num_days` ago on, rows on some of the days (by age in days), dead sessions, and statistics."""
    ensure_partitions(dsn, now - num_days * DAY, days_ahead=num_days + 7)
    for age, rows in rows_by_age.items():
        add_day(dsn, now - age * DAY, rows)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(_SESSIONS)
        connection.execute("VACUUM ANALYZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    kind: str
    relation: str | None


class Plans:
    """How the server executes statements, each in a transaction that is rolled back.

    `num_uses`: how often the statement was executed before, prepared: then the server may have turned to a generic plan, made
    without knowing the parameters.
    """

    def __init__(self, dsn: str, *, num_uses: int) -> None:
        self._dsn = dsn
        self._num_uses = num_uses

    def nodes(self, statement: str, parameters: Mapping[str, Any]) -> list[Node]:
        with self._prepared(statement, parameters) as (connection, call):
            for _ in range(self._num_uses):
                connection.execute(sql.SQL("EXPLAIN {}").format(call))
            explain = sql.SQL("EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF, FORMAT JSON) {}").format(call)
            row = connection.execute(explain).fetchone()
        assert row is not None
        return list(_nodes(row[0][0]["Plan"]))

    def scanned(self, statement: str, parameters: Mapping[str, Any], filled: Sequence[str]) -> list[str]:
        """Those of the filled tables that are read as a whole."""
        nodes = self.nodes(statement, parameters)
        return [node.relation for node in nodes if node.kind == "Seq Scan" and node.relation in filled]

    def considered(self, statement: str, parameters: Mapping[str, Any]) -> set[str]:
        """The days' partitions that the plan has, executed or not."""
        relations = (node.relation for node in self.nodes(statement, parameters))
        return {name for name in relations if name is not None and _PARTITIONED.match(name)}

    @contextmanager
    def _prepared(
        self, statement: str, parameters: Mapping[str, Any]
    ) -> Iterator[tuple[psycopg.Connection[Any], sql.Composed]]:
        names = list(dict.fromkeys(re.findall(r"%\((\w+)\)[sb]", statement)))
        numbered = re.sub(r"%\((\w+)\)[sb]", lambda match: f"${names.index(match[1]) + 1}", statement)
        values = sql.SQL(", ").join(sql.Literal(parameters[name]) for name in names)
        with psycopg.connect(self._dsn) as connection:
            connection.execute(f"PREPARE hot AS {numbered.replace('%%', '%')}".encode())
            yield connection, sql.SQL("EXECUTE hot({})" if names else "EXECUTE hot").format(values)
            connection.rollback()


def _nodes(plan: dict[str, Any]) -> Iterator[Node]:
    yield Node(kind=plan["Node Type"], relation=plan.get("Relation Name"))
    for child in plan.get("Plans", []):
        yield from _nodes(child)


def partitions_of(day: datetime) -> set[str]:
    return {f"{table}_p{day.astimezone(UTC):%Y%m%d}" for table in ("generations", "attempts", "chunks")}
