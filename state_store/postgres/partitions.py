"""Daily partitions of the tables that grow with traffic: created ahead, dropped when their time is over.

Bounds are UUIDv7 values: the first 48 bits of such an id are its Unix time in milliseconds (RFC 9562, section 5.7). Rows
without a partition of their day land in the default partition, so a late caller loses nothing.

Attaching and detaching want, for a moment, a lock that every query of the table waits behind. DETACH ... CONCURRENTLY would
not, but Postgres refuses it where there is a default partition. So the lock is asked for with a timeout that nobody notices,
and what does not get it is tried again in the next round.
"""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

import psycopg
from psycopg import errors, sql

from state_store.postgres.schema import PARTITIONED_TABLES

DEFAULT_DAYS_AHEAD = 7
PARTITION_NAME = re.compile(rf"^({'|'.join(PARTITIONED_TABLES)})_(p\d{{8}}|default)$")
DAY = timedelta(days=1)
_LOCK_KEY = 0x51D1CE01
_MS_SHIFT = 80
_PAUSE = timedelta(milliseconds=200)
"""Between tries, for those who waited behind the last one."""

_Connection = psycopg.Connection[tuple[object, ...]]

_DELETE_STRAYS = """
WITH over AS MATERIALIZED (
    SELECT g.generation_id FROM generations_default g
    WHERE g.generation_id < %(below)s::uuid AND g.finished_at < %(ended_before)s::timestamptz
    ORDER BY g.generation_id LIMIT %(limit)s FOR UPDATE SKIP LOCKED
), chunks_gone AS (
    DELETE FROM chunks c USING over WHERE c.generation_id = over.generation_id AND c.generation_id < %(below)s::uuid
), attempts_gone AS (
    DELETE FROM attempts a USING over WHERE a.generation_id = over.generation_id AND a.generation_id < %(below)s::uuid
)
DELETE FROM generations_default g USING over WHERE g.generation_id = over.generation_id
"""
# The request id of a live generation has no expiry, and its row is QUEUED or RUNNING.
_IS_IN_USE = """
SELECT EXISTS (SELECT FROM {partition} WHERE state = 'QUEUED')
    OR EXISTS (SELECT FROM {partition} WHERE state = 'RUNNING')
    OR EXISTS (
        SELECT FROM request_keys
        WHERE generation_id >= %(low)s::uuid AND generation_id < %(high)s::uuid
            AND expires_at >= %(now)s::timestamptz
    )
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedPartitions:
    """What one round of `drop_partitions` did. `in_use` wait for a live generation or a request id that is still in force,
    `locked` for a moment without a long transaction. `slowest_drop` is the longest that one partition took."""

    dropped: tuple[str, ...] = ()
    in_use: tuple[str, ...] = ()
    locked: tuple[str, ...] = ()
    deleted_strays: int = 0
    slowest_drop: timedelta = timedelta(0)


def lowest_id(at: datetime) -> UUID:
    """The smallest UUID whose time bits say `at`: a lower bound for the UUIDv7s from then on."""
    return UUID(int=int(at.timestamp() * 1000) << _MS_SHIFT)


def partition_of(table: str, day: datetime) -> str:
    return f"{table}_p{day:%Y%m%d}"


def ensure_partitions(
    dsn: str,
    now: datetime,
    *,
    days_ahead: int = DEFAULT_DAYS_AHEAD,
    max_tries: int = 20,
    lock_timeout: timedelta = timedelta(milliseconds=100),
) -> list[str]:
    """Creates what is missing from the day of `now` on, and returns the new names. Blocking; idempotent.

    A day whose first rows already lie in the default partition stays there: moving them would lock out every writer. A
    partition that does not get its locks within `max_tries` is left to the next call.
    """
    first = _day_of(now)
    days = [first + timedelta(days=offset) for offset in range(days_ahead + 1)]
    with _connect(dsn, lock_timeout) as connection:
        return [
            partition_of(table, day)
            for table in PARTITIONED_TABLES
            for day in days
            if not _exists(connection, partition_of(table, day)) and _attach(connection, table, day, max_tries)
        ]


def drop_partitions(
    dsn: str,
    now: datetime,
    *,
    kept: timedelta,
    max_strays: int = 1000,
    lock_timeout: timedelta = timedelta(milliseconds=100),
) -> DroppedPartitions:
    """Drops the days that ended at least `kept` before `now`, and at most `max_strays` such rows of the default partition.
    Blocking; one try for each partition; idempotent.

    A day stays whole while one of its generations lives, and while one of its request ids is in force: that one has to
    stand for its generation until 24 h after the end.
    """
    dropped: dict[str, float] = {}
    in_use: list[str] = []
    locked: list[str] = []
    with _connect(dsn, lock_timeout) as connection:
        for day in _days_before(connection, _day_of(now - kept)):
            if _exists(connection, partition_of("generations", day)) and _is_in_use(connection, day, now):
                in_use.append(partition_of("generations", day))
                continue
            # The generations go last: while they are there, the next round finds the rest of a half-dropped day.
            for table in reversed(PARTITIONED_TABLES):
                name, started = partition_of(table, day), time.perf_counter()
                if not _exists(connection, name):
                    continue
                if not _drop(connection, table, name):
                    locked.append(name)
                    break
                dropped[name] = time.perf_counter() - started
        strays = _delete_strays(connection, now, kept=kept, limit=max_strays)
    return DroppedPartitions(
        dropped=tuple(dropped),
        in_use=tuple(in_use),
        locked=tuple(locked),
        deleted_strays=strays,
        slowest_drop=timedelta(seconds=max(dropped.values(), default=0.0)),
    )


@contextmanager
def _connect(dsn: str, lock_timeout: timedelta) -> Iterator[_Connection]:
    """One process at a time; the others wait for it."""
    with psycopg.connect(dsn, autocommit=True, options="-c lock_timeout=5s") as connection:
        connection.execute("SELECT pg_advisory_lock(%s)", (_LOCK_KEY,))
        connection.execute(f"SET lock_timeout = {round(lock_timeout / timedelta(milliseconds=1))}")
        yield connection


def _day_of(at: datetime) -> datetime:
    return at.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)


def _exists(connection: _Connection, name: str) -> bool:
    found = connection.execute("SELECT to_regclass(%s) IS NOT NULL", (name,)).fetchone()
    return found is not None and bool(found[0])


def _attach(connection: _Connection, table: str, day: datetime, max_tries: int) -> bool:
    """Attaching locks the parent against other attachers only; creating it in place would lock out readers. The default
    partition is locked for everybody while it is searched for rows of the day."""
    names = {"partition": sql.Identifier(partition_of(table, day)), "parent": sql.Identifier(table)}
    bounds = (str(lowest_id(day)), str(lowest_id(day + DAY)))
    create = sql.SQL("CREATE TABLE {partition} (LIKE {parent} INCLUDING DEFAULTS INCLUDING CONSTRAINTS)")
    attach = sql.SQL("ALTER TABLE {parent} ATTACH PARTITION {partition} FOR VALUES FROM ({low}) TO ({high})")
    for attempt in range(max_tries):
        if attempt:
            time.sleep(_PAUSE.total_seconds())
        try:
            with connection.transaction():
                connection.execute(create.format(**names))
                connection.execute(attach.format(**names, low=sql.Literal(bounds[0]), high=sql.Literal(bounds[1])))
        except errors.CheckViolation:
            return False
        except errors.LockNotAvailable:
            continue
        return True
    return False


def _days_before(connection: _Connection, end: datetime) -> list[datetime]:
    """The days before `end` of which a partition is there, attached or not, oldest first."""
    found = connection.execute(
        "SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = to_regnamespace(current_schema()::text)"
        " AND relname ~ %s",
        (PARTITION_NAME.pattern,),
    ).fetchall()
    names = [str(name) for (name,) in found if not str(name).endswith("_default")]
    days = {datetime.strptime(name[-8:], "%Y%m%d").replace(tzinfo=UTC) for name in names}
    return sorted(day for day in days if day < end)


def _is_in_use(connection: _Connection, day: datetime, now: datetime) -> bool:
    query = sql.SQL(_IS_IN_USE).format(partition=sql.Identifier(partition_of("generations", day)))
    bounds = {"low": lowest_id(day), "high": lowest_id(day + DAY), "now": now}
    found = connection.execute(query, bounds).fetchone()
    return found is not None and bool(found[0])


def _drop(connection: _Connection, table: str, name: str) -> bool:
    """False when a lock was not to be had. Detaching changes the catalogue alone, and what it locks out it locks out for
    that moment; the files are deleted afterwards, when nothing but this process knows them."""
    names = {"partition": sql.Identifier(name), "parent": sql.Identifier(table)}
    try:
        if _is_attached(connection, name):
            connection.execute(sql.SQL("ALTER TABLE {parent} DETACH PARTITION {partition}").format(**names))
        connection.execute(sql.SQL("DROP TABLE {partition}").format(**names))
    except errors.LockNotAvailable:
        return False
    return True


def _is_attached(connection: _Connection, name: str) -> bool:
    found = connection.execute("SELECT relispartition FROM pg_class WHERE oid = %s::regclass", (name,)).fetchone()
    return found is not None and bool(found[0])


def _delete_strays(connection: _Connection, now: datetime, *, kept: timedelta, limit: int) -> int:
    """Rows of days that never got a partition."""
    parameters = {"below": lowest_id(_day_of(now - kept)), "ended_before": now - DAY, "limit": limit}
    return connection.execute(_DELETE_STRAYS, parameters).rowcount
