"""Real Postgres and Valkey for every test that asks: one of each per test session, without fsync."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.local.postgres import LocalPostgres
from sluice.local.valkey import LocalValkey
from tests.support.redis_server import RedisServer, redis_server_binary


@pytest.fixture(scope="session")
def server_directory() -> Iterator[Path]:
    """A directory that Postgres' own user can reach, unlike pytest's temporary directories."""
    directory = Path(tempfile.mkdtemp(prefix="sluice-tests-"))
    directory.chmod(0o711)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_server(server_directory: Path) -> Iterator[LocalPostgres]:
    """`.dsn` is the administration database; `.create_database(name, template=None)` returns the DSN of a new one."""
    with LocalPostgres(server_directory / "postgres", fsync=False) as server:
        yield server
        server.kill()  # nobody needs what it would write at an orderly stop


@pytest.fixture(scope="session")
def valkey_server(server_directory: Path) -> Iterator[LocalValkey]:
    """`.url` is shared by the session: use a key prefix or FLUSHDB of your own."""
    with LocalValkey(server_directory / "valkey", fsync=False) as server:
        yield server


@pytest.fixture(scope="session")
def redis_server(server_directory: Path) -> Iterator[RedisServer]:
    """Redis itself, where this machine has one; `.url` is shared by the session."""
    binary = redis_server_binary()
    if binary is None:
        pytest.skip("no redis-server on PATH, and SLUICE_TEST_REDIS_SERVER names none")
    with RedisServer(binary, server_directory / "redis") as server:
        yield server
