"""Connections to Redis or Valkey: bounded in number and time, and what counts as the server not being reachable."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from hiredis import pack_command
from redis import exceptions as redis_errors
from redis.asyncio import BlockingConnectionPool, Connection, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from service_kit.errors import UnavailableError

_UNAVAILABLE_TYPES = (
    redis_errors.ConnectionError,
    redis_errors.TimeoutError,
    redis_errors.ReadOnlyError,
    redis_errors.OutOfMemoryError,
    redis_errors.ClusterDownError,
    redis_errors.TryAgainError,
)
_UNAVAILABLE_CODES = ("BUSY", "LOADING", "MISCONF", "NOREPLICAS", "OOM", "READONLY")
"""Answers of a server that lives but cannot serve now: loading, a replica, full, unable to persist, stuck in a script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisSettings:
    """A call waits at most `pool_timeout` for a connection, `connect_timeout` to open one, and `socket_timeout` for each
    answer. A subscription holds one connection of the pool."""

    max_connections: int = 32
    pool_timeout: timedelta = timedelta(seconds=2)
    connect_timeout: timedelta = timedelta(seconds=2)
    socket_timeout: timedelta = timedelta(seconds=5)


class _PackingConnection(Connection):
    """Packs commands in C. A batch of tokens is a command of hundreds of arguments, and this client packs them in Python."""

    def pack_command(self, *args: Any) -> list[bytes]:
        name, *rest = args
        words = name.split() if isinstance(name, str) else [name]  # "CONFIG GET" is two
        return [pack_command((*words, *rest))]


def connect_redis(url: str, settings: RedisSettings | None = None) -> Redis:
    """A client for `url` (redis://, rediss:// or unix://); connects on first use, closed by `aclose()`.

    It never repeats a command by itself: whether repeating is right is known to the caller alone.
    """
    settings = settings or RedisSettings()
    pool = BlockingConnectionPool.from_url(
        url,
        connection_class=_PackingConnection,  # a URL of TLS or of a socket has its own
        protocol=2,
        decode_responses=False,
        max_connections=settings.max_connections,
        timeout=settings.pool_timeout.total_seconds(),
        socket_connect_timeout=settings.connect_timeout.total_seconds(),
        socket_timeout=settings.socket_timeout.total_seconds(),
        retry=Retry(NoBackoff(), 0),
    )
    return Redis.from_pool(pool)


def is_unavailable(error: RedisError) -> bool:
    """Whether the server could not be reached or could not serve; else the call itself was wrong: our bug."""
    if isinstance(error, _UNAVAILABLE_TYPES):
        return True
    return isinstance(error, ResponseError) and str(error).startswith(_UNAVAILABLE_CODES)


@contextmanager
def unavailable_as(error_type: type[UnavailableError], what: str) -> Iterator[None]:
    """Raises `error_type` for an unreachable server; other errors pass."""
    try:
        yield
    except RedisError as error:
        if not is_unavailable(error):
            raise
        raise error_type(f"{what} cannot be reached: {type(error).__name__}") from error
