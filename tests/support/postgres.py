"""Databases with the schema: alembic builds a template once per test session, each caller gets a copy."""

from collections.abc import AsyncIterator, Callable
from itertools import count

import pytest
import pytest_asyncio

from sluice.local.postgres import LocalPostgres
from state_store.memory.store import MemoryStore
from state_store.postgres.migrate import upgrade
from state_store.postgres.store import PostgresStore
from tests.support.generations import Store

_TEMPLATE = "sluice_template"


@pytest.fixture(scope="session")
def make_store_dsn(postgres_server: LocalPostgres) -> Callable[[], str]:
    """Returns the DSN of a new, empty database with the current schema."""
    upgrade(postgres_server.create_database(_TEMPLATE))
    numbers = count(1)
    return lambda: postgres_server.create_database(f"sluice_{next(numbers)}", template=_TEMPLATE)


@pytest.fixture
def store_dsn(make_store_dsn: Callable[[], str]) -> str:
    return make_store_dsn()


@pytest_asyncio.fixture
async def postgres_store(store_dsn: str) -> AsyncIterator[PostgresStore]:
    """An open store over its own database."""
    store = PostgresStore(store_dsn)
    await store.open()
    yield store
    await store.close()


@pytest_asyncio.fixture(params=["memory", "postgres"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """The memory twin, and real Postgres: for the contract of the stores."""
    if request.param == "memory":
        yield MemoryStore()
        return
    postgres = PostgresStore(request.getfixturevalue("store_dsn"))
    await postgres.open()
    yield postgres
    await postgres.close()
