"""Hints about cancelled generations over Redis pub/sub."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgpack  # type: ignore[import-untyped]
from redis.asyncio import Redis

from scheduler.queue.errors import QueueUnavailableError
from service_kit.ids import GenerationId
from state_store.delta_log.connection import unavailable_as
from state_store.delta_log.redis_feed import RedisFeed

CHANNEL = "scheduler:cancelled"


class RedisCancelHints:
    """`CancelHints` over Redis pub/sub. The caller owns `client` and closes it."""

    def __init__(self, client: Redis) -> None:
        self._client = client

    async def publish(self, generation_ids: Sequence[GenerationId]) -> None:
        with unavailable_as(QueueUnavailableError, "Redis"):
            await self._client.publish(CHANNEL, msgpack.packb(list(generation_ids)))

    async def follow(self) -> AsyncGenerator[list[GenerationId], None]:
        async with aclosing(RedisFeed(self._client).messages(CHANNEL)) as messages:
            async for data in messages:
                if data is not None:
                    yield [GenerationId(generation_id) for generation_id in msgpack.unpackb(data)]
