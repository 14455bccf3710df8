"""Commands that work on the database: which one, and a store over it."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Annotated, Any, TypeVar

import psycopg
import typer
from psycopg.conninfo import conninfo_to_dict

from sluice.errors import UserError
from sluice.home import find_home
from sluice.run_file import read_run_file
from state_store.postgres.pool import PoolSettings
from state_store.postgres.store import PostgresStore

Answer = TypeVar("Answer")
_HASTY = PoolSettings()
PATIENT = PoolSettings(
    statement_timeout=timedelta(minutes=5), transaction_timeout=timedelta(minutes=5), call_timeout=timedelta(minutes=6)
)
"""For sums over months, that nobody else waits for."""
Dsn = Annotated[str | None, typer.Option(help="Database; default: SLUICE_POSTGRES_DSN, else the local stack's.")]


def find_dsn(option: str | None) -> str:
    """Option, then SLUICE_POSTGRES_DSN, then the stack that runs here. Raises UserError."""
    given = option or os.environ.get("SLUICE_POSTGRES_DSN")
    if given:
        return _checked(given)
    postgres: Any = read_run_file(find_home().run_file).get("postgres", {})
    if "dsn" not in postgres:
        raise UserError("name the database with --dsn or SLUICE_POSTGRES_DSN")
    return str(postgres["dsn"])


def _checked(dsn: str) -> str:
    try:
        conninfo_to_dict(dsn)
    except (psycopg.ProgrammingError, UnicodeEncodeError):  # whose words repeat the password
        raise UserError("--dsn or SLUICE_POSTGRES_DSN: give a libpq URL, as postgresql://user@host/database") from None
    return dsn


def with_store(
    dsn: str | None, work: Callable[[PostgresStore], Awaitable[Answer]], *, settings: PoolSettings = _HASTY
) -> Answer:
    """What `work` makes of an open store, which is closed afterwards."""

    async def run() -> Answer:
        store = PostgresStore(find_dsn(dsn), settings=settings)
        await store.open()
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())
