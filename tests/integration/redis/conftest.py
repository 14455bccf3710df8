from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from redis.asyncio import Redis

from sluice.local.valkey import LocalValkey
from state_store.delta_log.connection import RedisSettings, connect_redis
from tests.support.delta_logs import LOG_DATABASE, database_url

IMPATIENT = RedisSettings(
    max_connections=4,
    pool_timeout=timedelta(milliseconds=300),
    connect_timeout=timedelta(milliseconds=300),
    socket_timeout=timedelta(milliseconds=300),
)


@pytest.fixture(scope="module")
def own_server(server_directory: Path, request: pytest.FixtureRequest) -> Iterator[LocalValkey]:
    """A server that a test may kill, stop or break."""
    with LocalValkey(server_directory / request.module.__name__.rpartition(".")[2], fsync=False) as server:
        yield server


@pytest.fixture
async def own_client(own_server: LocalValkey) -> AsyncIterator[Redis]:
    own_server.start()
    client = connect_redis(own_server.url, IMPATIENT)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
async def client(valkey_server: LocalValkey) -> AsyncIterator[Redis]:
    client = connect_redis(database_url(valkey_server.url, LOG_DATABASE))
    await client.flushdb()
    yield client
    await client.aclose()
