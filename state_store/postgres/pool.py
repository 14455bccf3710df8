"""Connections to Postgres: bounded waits, few retries, and one error for "cannot be reached"."""

import asyncio
import select
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import psycopg
from psycopg import errors
from psycopg.conninfo import make_conninfo
from psycopg.rows import DictRow, dict_row
from psycopg_pool import AsyncConnectionPool

from state_store.errors import StoreUnavailableError
from state_store.postgres.probe import PostgresProbe
from state_store.pulse import Pulse

Connection = psycopg.AsyncConnection[DictRow]
Parameters = Mapping[str, Any]
Result = TypeVar("Result")

_MAX_TRIES = 4
_LAST_PATIENCE_S = 1.0
"""At the close, with calls that were given up."""
_RETRYABLE = (errors.DeadlockDetected, errors.SerializationFailure, errors.UniqueViolation)
"""Rolled back for the company they were in. A unique violation is two first writers of one id; the loser then sees it."""
_UNAVAILABLE = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    errors.ReadOnlySqlTransaction,
    errors.IdleInTransactionSessionTimeout,
    errors.TransactionTimeout,
    TimeoutError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Sizes and bounds. A call takes at most `call_timeout`, whatever the network does; the others end it earlier.

    `idle_timeout` ends a transaction whose process was paused, so that its locks do not stop a takeover. A process that is
    paused between a statement and its Sync does not count as idle: `transaction_timeout` (PostgreSQL 17) ends that one.
    """

    min_size: int = 1
    max_size: int = 8
    acquire_timeout: timedelta = timedelta(seconds=2)
    connect_timeout: timedelta = timedelta(seconds=3)
    statement_timeout: timedelta = timedelta(seconds=5)
    lock_timeout: timedelta = timedelta(seconds=2)
    idle_timeout: timedelta = timedelta(seconds=2)
    transaction_timeout: timedelta = timedelta(seconds=4)
    call_timeout: timedelta = timedelta(seconds=10)
    fails_fast: bool = False
    """Every call ends as soon as Postgres is known not to answer (see pulse.py): for a process whose calls all have
    somebody waiting who can come again."""


class Transaction:
    """Statements of one transaction, in pipeline mode: what is sent travels with the next fetch, or with the commit."""

    def __init__(self, connection: Connection, pipeline: psycopg.AsyncPipeline) -> None:
        self._connection = connection
        self._pipeline = pipeline

    async def send(self, statement: str, parameters: Parameters) -> None:
        """An error surfaces with the next fetch or the commit."""
        await self._connection.execute(statement, parameters)

    async def fetch(self, statement: str, parameters: Parameters) -> list[DictRow]:
        """One round trip. It ends with a Sync: after a mere Flush, Postgres would not count a paused process as idle,
        and would keep its locks for ever."""
        cursor = await self._connection.execute(statement, parameters)
        await self._pipeline.sync()
        return await cursor.fetchall()


class Database:
    """A pool of autocommitting connections with UTC sessions; `open` and `close` are idempotent."""

    def __init__(self, dsn: str, settings: PoolSettings) -> None:
        self._dsn = dsn
        self._settings = settings
        self._pool: AsyncConnectionPool[Connection] | None = None
        self._probe = PostgresProbe(_conninfo(dsn, settings))
        self._given_up: set[asyncio.Future[Any]] = set()
        self.pulse = Pulse(self._probe)

    async def open(self) -> None:
        """Returns at once; connections are made in the background and the first call waits for one."""
        if self._pool is None:
            self._pool = self._make_pool()
            await self._pool.open()

    async def close(self) -> None:
        if self._pool is not None:
            pool, self._pool = self._pool, None
            await self.pulse.close()
            await self._probe.close()
            if self._given_up:
                await asyncio.wait(self._given_up, timeout=_LAST_PATIENCE_S)
            await pool.close()

    async def fetch(self, statement: str, parameters: Parameters) -> list[DictRow]:
        """One statement, which is its own transaction."""

        async def work(connection: Connection) -> list[DictRow]:
            cursor = await connection.execute(statement, parameters)
            return await cursor.fetchall()

        return await self._run(work)

    async def transact(self, work: Callable[[Transaction], Awaitable[Result]]) -> Result:
        """`work` in one transaction; it is repeated when it was rolled back for the company it was in."""

        async def transaction(connection: Connection) -> Result:
            async with connection.pipeline() as pipeline, connection.transaction():
                return await work(Transaction(connection, pipeline))

        return await self._run(transaction)

    async def _run(self, work: Callable[[Connection], Awaitable[Result]]) -> Result:
        """Raises StoreUnavailableError; errors that are our bugs pass."""
        if self._pool is None:
            raise StoreUnavailableError("the store is not open")
        call = partial(self._bounded, partial(_retried, self._pool, work))
        try:
            return await (self.pulse.while_answering(call) if self._settings.fails_fast else call())
        except (*_RETRYABLE, *_UNAVAILABLE) as error:
            raise StoreUnavailableError(f"Postgres does not answer: {type(error).__name__}") from error

    async def _bounded(self, call: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Raises TimeoutError. A call that is over is cancelled and not waited for: psycopg asks the server to cancel the
        statement and waits for its answer, which takes up to 10 s more where the server stands still."""
        task = asyncio.create_task(call())
        try:
            done, _ = await asyncio.wait({task}, timeout=self._settings.call_timeout.total_seconds())
            if not done:
                raise TimeoutError
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                self._given_up.add(task)
                task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Future[Any]) -> None:
        self._given_up.discard(task)
        if not task.cancelled():
            task.exception()  # its caller is gone: it must not count as overlooked

    def _make_pool(self) -> AsyncConnectionPool[Connection]:
        settings = self._settings
        return AsyncConnectionPool(
            _conninfo(self._dsn, settings),
            connection_class=Connection,
            kwargs={"autocommit": True, "row_factory": dict_row},
            min_size=settings.min_size,
            max_size=settings.max_size,
            timeout=settings.acquire_timeout.total_seconds(),
            # A short give-up: afterwards the next caller makes the pool try again at once, without a grown back-off.
            reconnect_timeout=settings.connect_timeout.total_seconds(),
            check=_check,
            open=False,
        )


async def _check(connection: Connection) -> None:
    """A server that went away has closed the socket, and so left something to read: only then it is asked whether it lives.
    Asking always would be a round trip more for every call."""
    waiting = select.poll()
    waiting.register(connection.fileno(), select.POLLIN)
    if waiting.poll(0):
        await AsyncConnectionPool.check_connection(connection)


async def _retried(pool: AsyncConnectionPool[Connection], work: Callable[[Connection], Awaitable[Result]]) -> Result:
    for _ in range(_MAX_TRIES - 1):
        try:
            async with pool.connection() as connection:
                return await work(connection)
        except _RETRYABLE:
            continue
    async with pool.connection() as connection:
        return await work(connection)


def _conninfo(dsn: str, settings: PoolSettings) -> str:
    bounds = {
        "statement_timeout": settings.statement_timeout,
        "lock_timeout": settings.lock_timeout,
        "idle_in_transaction_session_timeout": settings.idle_timeout,
        "transaction_timeout": settings.transaction_timeout,
    }
    options = [f"-c {name}={_milliseconds(bound)}" for name, bound in bounds.items()]
    return make_conninfo(
        dsn,
        connect_timeout=max(1, round(settings.connect_timeout.total_seconds())),
        tcp_user_timeout=_milliseconds(settings.call_timeout),
        application_name="sluice",
        options=" ".join([*options, "-c TimeZone=UTC"]),
    )


def _milliseconds(duration: timedelta) -> int:
    return round(duration / timedelta(milliseconds=1))


class PostgresPart:
    """Base of the parts of the store: they share one pool."""

    def __init__(self, database: Database) -> None:
        self._database = database
