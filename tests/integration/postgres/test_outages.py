from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

from sluice.local.postgres import LocalPostgres
from state_store.errors import StoreUnavailableError
from state_store.model import CancelCause
from state_store.postgres.migrate import upgrade
from state_store.postgres.pool import PoolSettings
from state_store.postgres.store import PostgresStore
from tests.support.generations import new_generation, submitted

SHORT = PoolSettings(
    acquire_timeout=timedelta(seconds=1), lock_timeout=timedelta(milliseconds=100), call_timeout=timedelta(seconds=3)
)


@pytest.fixture(scope="module")
def own_server(server_directory: Path) -> Iterator[LocalPostgres]:
    """A server that a test may stop."""
    with LocalPostgres(server_directory / "outages", fsync=False) as server:
        yield server


async def test_a_stopped_server_is_unavailable_and_a_restarted_one_is_used_again(own_server: LocalPostgres) -> None:
    dsn = own_server.create_database("outages")
    upgrade(dsn)
    store = PostgresStore(dsn, settings=SHORT)
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
