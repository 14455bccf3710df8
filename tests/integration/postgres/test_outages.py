import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

from sluice.local.postgres import LocalPostgres
from state_store.errors import StoreUnavailableError
from state_store.model import CancelCause, SessionRecord, SessionState
from state_store.postgres.migrate import upgrade
from state_store.postgres.pool import PoolSettings
from state_store.postgres.store import PostgresStore
from tests.support.generations import new_generation, new_session, submitted
from tests.support.processes import send_to_tree

SHORT = PoolSettings(
    acquire_timeout=timedelta(seconds=1), lock_timeout=timedelta(milliseconds=100), call_timeout=timedelta(seconds=3)
)


@pytest.fixture(scope="module")
def own_server(server_directory: Path) -> Iterator[LocalPostgres]:
    """A server that a test may stop."""
    with LocalPostgres(server_directory / "outages", fsync=False) as server:
        yield server


@pytest.fixture(scope="module")
def own_dsn(own_server: LocalPostgres) -> str:
    dsn = own_server.create_database("outages")
    upgrade(dsn)
    return dsn


async def test_a_stopped_server_is_unavailable_and_a_restarted_one_is_used_again(
    own_server: LocalPostgres, own_dsn: str
) -> None:
    store = PostgresStore(own_dsn, settings=SHORT)
    await store.open()
    record = await submitted(store)
    own_server.kill()
    with pytest.raises(StoreUnavailableError):
        await store.get_many([record.generation_id])
    with pytest.raises(StoreUnavailableError):
        await store.submit_many([new_generation()])
    own_server.start()
    assert await _first_answer(store, record.generation_id) == [record]
    await store.close()


async def _first_answer(store: PostgresStore, generation_id):
    for _ in range(20):
        try:
            return await store.get_many([generation_id])
        except StoreUnavailableError:
            continue
    return None


async def test_a_connection_that_the_server_has_closed_is_replaced_and_no_call_fails(
    emptied_postgres_store: PostgresStore, store_admin: str
) -> None:
    async with await psycopg.AsyncConnection.connect(store_admin, autocommit=True) as admin:
        others = await _connections(admin)
        store = PostgresStore(store_admin, settings=PoolSettings(acquire_timeout=timedelta(seconds=10)))
        await store.open()
        record = await submitted(store)
        own = await _connections(admin) - others
        ended = await admin.execute("SELECT pg_terminate_backend(pid, 5000) FROM unnest(%s::int[]) pid", (list(own),))
        assert await ended.fetchall() == [(True,)] * len(own)
        assert own
    assert await store.get_many([record.generation_id]) == [record]
    await store.close()


async def _connections(admin: psycopg.AsyncConnection) -> set[int]:
    """Process ids of the stores' connections."""
    found = await admin.execute("SELECT pid FROM pg_stat_activity WHERE application_name = 'sluice'")
    return {pid for (pid,) in await found.fetchall()}


async def test_a_lock_that_is_held_too_long_is_unavailable_and_nothing_was_written(
    emptied_postgres_store: PostgresStore, store_admin: str
) -> None:
    store = PostgresStore(store_admin, settings=SHORT)
    await store.open()
    record = await submitted(store)
    async with await psycopg.AsyncConnection.connect(store_admin) as holder:
        await holder.execute("SELECT FROM generations FOR UPDATE")
        with pytest.raises(StoreUnavailableError, match="LockNotAvailable"):
            await store.request_cancel_many([(record.generation_id, CancelCause.CLIENT)])
    assert await store.get_many([record.generation_id]) == [record]
    await store.close()


async def test_a_store_that_is_not_open_is_unavailable() -> None:
    store = PostgresStore("postgresql://sluice@127.0.0.1:1/none", settings=SHORT)
    with pytest.raises(StoreUnavailableError):
        await store.get_many([])
    await store.open()
    await store.open()
    with pytest.raises(StoreUnavailableError):
        await store.get_many([])
    await store.close()
    await store.close()
    with pytest.raises(StoreUnavailableError):
        await store.get_many([])


async def test_leases_that_look_over_because_the_server_stood_still_are_not_taken(
    own_server: LocalPostgres, own_dsn: str
) -> None:
    store = PostgresStore(own_dsn)
    await store.open()
    session = new_session()
    await store.open_session(session, lease=timedelta(milliseconds=700))
    pid = own_server.pid
    assert pid is not None
    send_to_tree(pid, signal.SIGSTOP)
    losing = asyncio.create_task(store.lose_expired(limit=10))
    await asyncio.sleep(1.2)  # what is measured here is time
    send_to_tree(pid, signal.SIGCONT)
    with pytest.raises(StoreUnavailableError, match="stood still"):
        await losing
    assert [session.state for session in await store.list_sessions()] == [SessionState.LIVE]
    assert [lost.session_id for lost in await store.lose_expired(limit=10)] == [session.session_id]
    await store.close()


async def test_after_a_failover_to_a_server_that_may_not_write_yet_writes_are_unavailable(own_dsn: str) -> None:
    async with await psycopg.AsyncConnection.connect(own_dsn, autocommit=True) as admin:
        await admin.execute("ALTER DATABASE outages SET default_transaction_read_only = on")
        store = PostgresStore(own_dsn)
        await store.open()
        new = new_generation()
        try:
            with pytest.raises(StoreUnavailableError, match="ReadOnlySqlTransaction"):
                await store.submit_many([new])
            assert await store.get_many([new.generation_id]) == [None]
        finally:
            await admin.execute("SET default_transaction_read_only = off")
            await admin.execute("ALTER DATABASE outages RESET default_transaction_read_only")
            await store.close()


async def test_a_store_that_fails_fast_does_not_wait_for_a_server_that_stands_still(
    own_server: LocalPostgres, own_dsn: str
) -> None:
    store = PostgresStore(own_dsn, settings=PoolSettings(fails_fast=True))
    await store.open()
    await store.list_sessions()
    pid = own_server.pid
    assert pid is not None
    send_to_tree(pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(3):  # a call may take 10 s
            with pytest.raises(StoreUnavailableError):
                await store.list_sessions()
    finally:
        send_to_tree(pid, signal.SIGCONT)
    assert await _first_answer_of(store.list_sessions) == []
    await store.close()


async def _first_answer_of(call: Callable[[], Awaitable[list[SessionRecord]]]) -> list[SessionRecord]:
    async with asyncio.timeout(20):
        while True:
            try:
                return await call()
            except StoreUnavailableError:
                await asyncio.sleep(0.02)
