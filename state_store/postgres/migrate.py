"""Brings a database to the schema of this build. Blocking: call it from a command, or through a thread.

Migrations expand in one release and contract in a later one, so a newer schema than this build's is fine to run on.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import psycopg
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory

from state_store.errors import StoreUnavailableError
from state_store.postgres.partitions import ensure_partitions

_POLL = timedelta(milliseconds=200)


def alembic_config(dsn: str) -> Config:
    """Alembic's configuration for the migrations of this build, wherever they are installed."""
    config = Config()
    config.set_main_option("script_location", "migrations:.")
    config.set_main_option("path_separator", "os")
    config.attributes["dsn"] = dsn
    return config


def head_revision() -> str:
    head = ScriptDirectory.from_config(alembic_config("")).get_current_head()
    assert head is not None
    return head


def upgrade(dsn: str, *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
    """Runs the missing migrations, one process at a time, and creates the partitions of the coming days. Idempotent."""
    command.upgrade(alembic_config(dsn), "head")
    ensure_partitions(dsn, clock())


def downgrade(dsn: str, revision: str) -> None:
    command.downgrade(alembic_config(dsn), revision)


def current_revision(dsn: str) -> str | None:
    """The revision of the database; None before the first migration. Raises StoreUnavailableError."""
    try:
        with psycopg.connect(dsn, connect_timeout=3) as connection:
            if connection.execute("SELECT to_regclass('alembic_version')").fetchone() == (None,):
                return None
            found = connection.execute("SELECT version_num FROM alembic_version").fetchone()
            return str(found[0]) if found is not None else None
    except psycopg.OperationalError as error:
        raise StoreUnavailableError(f"Postgres cannot be reached: {error}") from error


def wait_for_server(dsn: str, timeout: timedelta, *, clock: Callable[[], float] = time.monotonic) -> None:
    """Returns once Postgres answers, whatever its schema. Raises StoreUnavailableError after `timeout`."""
    _wait_until(lambda: _problem_of_server(dsn), timeout, clock)


def wait_for_schema(dsn: str, timeout: timedelta, *, clock: Callable[[], float] = time.monotonic) -> None:
    """Returns once the database has at least this build's revision. Raises StoreUnavailableError after `timeout`."""
    head = head_revision()
    _wait_until(lambda: _problem_of_schema(dsn, head), timeout, clock)


def _problem_of_server(dsn: str) -> str | None:
    try:
        current_revision(dsn)
    except StoreUnavailableError as error:
        return error.message
    return None


def _problem_of_schema(dsn: str, head: str) -> str | None:
    try:
        revision = current_revision(dsn)
    except StoreUnavailableError as error:
        return error.message
    if revision is not None and revision >= head:
        return None
    return f"the schema is at {revision} and has to reach {head}"


def _wait_until(problem_of: Callable[[], str | None], timeout: timedelta, clock: Callable[[], float]) -> None:
    deadline = clock() + timeout.total_seconds()
    while (problem := problem_of()) is not None:
        if clock() >= deadline:
            raise StoreUnavailableError(problem)
        time.sleep(_POLL.total_seconds())
