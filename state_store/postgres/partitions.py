"""Daily partitions of the tables that grow with traffic.

Bounds are UUIDv7 values: the first 48 bits of such an id are its Unix time in milliseconds (RFC 9562, section 5.7). Rows
without a partition of their day land in the default partition, so a late caller loses nothing.
"""

import re
from datetime import UTC, datetime, timedelta
from uuid import UUID

import psycopg
from psycopg import errors, sql

from state_store.postgres.schema import PARTITIONED_TABLES

DEFAULT_DAYS_AHEAD = 7
PARTITION_NAME = re.compile(rf"^({'|'.join(PARTITIONED_TABLES)})_(p\d{{8}}|default)$")
_LOCK_KEY = 0x51D1CE01
_MS_SHIFT = 80


def lowest_id(at: datetime) -> UUID:
    """The smallest UUID whose time bits say `at`: a lower bound for the UUIDv7s from then on."""
    return UUID(int=int(at.timestamp() * 1000) << _MS_SHIFT)


def partition_of(table: str, day: datetime) -> str:
    return f"{table}_p{day:%Y%m%d}"


def ensure_partitions(dsn: str, now: datetime, *, days_ahead: int = DEFAULT_DAYS_AHEAD) -> list[str]:
    """Creates what is missing from the day of `now` on, and returns the new names. Blocking; idempotent.

    A day whose first rows already lie in the default partition stays there: moving them would lock out every writer.
    """
    first = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    days = [first + timedelta(days=offset) for offset in range(days_ahead + 1)]
    with psycopg.connect(dsn, autocommit=True, options="-c lock_timeout=5s") as connection:
        connection.execute("SELECT pg_advisory_lock(%s)", (_LOCK_KEY,))
        return [
            partition_of(table, day)
            for table in PARTITIONED_TABLES
            for day in days
            if not _exists(connection, partition_of(table, day)) and _attach(connection, table, day)
        ]


def _exists(connection: psycopg.Connection[tuple[object, ...]], name: str) -> bool:
    found = connection.execute("SELECT to_regclass(%s) IS NOT NULL", (name,)).fetchone()
    return found is not None and bool(found[0])


def _attach(connection: psycopg.Connection[tuple[object, ...]], table: str, day: datetime) -> bool:
    """Attaching locks the parent against other attachers only; creating it in place would lock out readers."""
    names = {"partition": sql.Identifier(partition_of(table, day)), "parent": sql.Identifier(table)}
    bounds = (str(lowest_id(day)), str(lowest_id(day + timedelta(days=1))))
    create = sql.SQL("CREATE TABLE {partition} (LIKE {parent} INCLUDING DEFAULTS INCLUDING CONSTRAINTS)")
    attach = sql.SQL("ALTER TABLE {parent} ATTACH PARTITION {partition} FOR VALUES FROM ({low}) TO ({high})")
    try:
        with connection.transaction():
            connection.execute(create.format(**names))
            connection.execute(attach.format(**names, low=sql.Literal(bounds[0]), high=sql.Literal(bounds[1])))
    except errors.CheckViolation:
        return False
    return True
