import pytest

from state_store.postgres.store import PostgresStore


@pytest.fixture
def store_admin(emptied_postgres_store: PostgresStore) -> str:
    """The DSN of the shared store's database, for looking at it from outside."""
    return emptied_postgres_store._database._dsn
