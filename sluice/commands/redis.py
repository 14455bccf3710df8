"""Commands that work on Redis or Valkey beside the database: which one, and a client of it."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import typer
from redis.asyncio import Redis
from redis.exceptions import RedisError

from service_kit.errors import UnavailableError
from sluice.commands.database import find_dsn
from sluice.errors import UserError
from sluice.home import find_home
from sluice.run_file import read_run_file
from state_store.delta_log.connection import connect_redis
from state_store.postgres.store import PostgresStore

Answer = TypeVar("Answer")
RedisUrl = Annotated[
    str | None, typer.Option(help="Redis or Valkey; default: SLUICE_REDIS_URL, else the local stack's.")
]


def find_redis_url(option: str | None) -> str:
    """Option, then SLUICE_REDIS_URL, then the stack that runs here. Raises UserError."""
    given = option or os.environ.get("SLUICE_REDIS_URL")
    if given:
        return given
    valkey: Any = read_run_file(find_home().run_file).get("valkey", {})
    if "url" not in valkey:
        raise UserError("name the Redis with --redis-url or SLUICE_REDIS_URL")
    return str(valkey["url"])


def with_stores(
    dsn: str | None, redis_url: str | None, work: Callable[[PostgresStore, Redis], Awaitable[Answer]]
) -> Answer:
    """What `work` makes of an open store and a client, which are closed afterwards."""

    async def run() -> Answer:
        store = PostgresStore(find_dsn(dsn))
        redis = _connect(find_redis_url(redis_url))
        await store.open()
        try:
            return await work(store, redis)
        except RedisError as error:  # what is not an outage: a user that may not do this, or a server that is none
            raise UnavailableError(f"Redis refuses: {error}") from error
        finally:
            await redis.aclose()
            await store.close()

    return asyncio.run(run())


def _connect(url: str) -> Redis:
    try:
        return connect_redis(url)
    except ValueError as error:
        raise UserError(f"--redis-url: {error}") from None
