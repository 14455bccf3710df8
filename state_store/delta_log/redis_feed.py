"""Pushes to one gateway over Redis pub/sub, on a connection of its own."""

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from redis import exceptions as redis_errors
from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from service_kit.ids import GatewayId
from state_store.delta_log.codec import unpack_pushes
from state_store.delta_log.connection import is_unavailable
from state_store.delta_log.port import Push

Batch = Sequence[Push] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedSettings:
    """After `ping_interval` without a message the server is pinged; a ping unanswered for as long ends the connection.
    Reconnects wait from `min_backoff` doubling to `max_backoff`, each cut by up to a half at random."""

    ping_interval: timedelta = timedelta(seconds=2)
    min_backoff: timedelta = timedelta(milliseconds=50)
    max_backoff: timedelta = timedelta(seconds=2)


class RedisFeed:
    """Endless pushes: see `DeltaLogReader.subscribe`. A reader that is too slow is cut off by the server's output buffer
    limit and so told to attach again."""

    def __init__(
        self,
        client: Redis,
        *,
        settings: FeedSettings | None = None,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._client = client
        self._settings = settings or FeedSettings()
        self._sleep = sleep
        self._uniform = uniform

    async def follow(self, gateway_id: GatewayId) -> AsyncGenerator[Batch, None]:
        async with aclosing(self.messages(f"log:gw:{gateway_id}")) as messages:
            async for data in messages:
                yield unpack_pushes(data) if data is not None else None

    async def messages(self, channel: str) -> AsyncGenerator[bytes | None, None]:
        """What is published on one channel; None whenever the subscription begins (again): before it, messages may have
        been missed."""
        num_failures = 0
        while True:
            connection = self._client.pubsub()
            try:
                await connection.subscribe(channel)
                while True:
                    message = await self._next_message(connection)
                    num_failures = 0
                    if message["type"] == "subscribe":
                        yield None
                    elif message["type"] == "message":
                        yield message["data"]
            except RedisError as error:
                if not is_unavailable(error):
                    raise
            finally:
                await connection.aclose()  # type: ignore[no-untyped-call]
            await self._sleep(self._backoff_s(num_failures))
            num_failures += 1

    async def _next_message(self, connection: PubSub) -> dict[str, Any]:
        timeout_s = self._settings.ping_interval.total_seconds()
        is_pinged = False
        while True:
            message: dict[str, Any] | None = await connection.get_message(timeout=timeout_s)
            if message is not None:
                return message
            if is_pinged:
                raise redis_errors.TimeoutError("the server does not answer a ping")
            await connection.ping()
            is_pinged = True

    def _backoff_s(self, num_failures: int) -> float:
        longest = self._settings.max_backoff.total_seconds()
        delay_s = min(longest, self._settings.min_backoff.total_seconds() * 2 ** min(num_failures, 16))
        return self._uniform(delay_s / 2, delay_s)
