"""News of the queue over Redis pub/sub: somebody put something in that another scheduler may pop."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from redis.asyncio import Redis

from state_store.delta_log.redis_feed import RedisFeed

CHANNEL = "queue:news"
"""The scripts publish here (lua/entries.lua)."""


class RedisQueueNews:
    """The caller owns `client` and closes it."""

    def __init__(self, client: Redis) -> None:
        self._client = client

    async def follow(self) -> AsyncGenerator[None, None]:
        """Endless: whenever entries were queued or put back, and whenever that may have been missed. A hint: an entry whose
        time comes, or a message that is lost, is found by looking now and then."""
        async with aclosing(RedisFeed(self._client).messages(CHANNEL)) as messages:
            async for _ in messages:
                yield None
