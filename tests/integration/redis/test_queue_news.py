"""Whoever waits for work hears of it at once; that it cannot be said keeps nothing from being queued."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from scheduler.queue.news import CHANNEL, RedisQueueNews
from scheduler.queue.redis_queue import RedisAdmissionQueue
from scheduler.queue.settings import QueueSettings
from sluice.local.valkey import LocalValkey
from tests.support.admission_queues import MODEL, QueueUnderTest, entry_of, server_queue

ANSWER_S = 10.0
QUIET_S = 0.2


@pytest.fixture
async def under_test(valkey_server: LocalValkey) -> AsyncIterator[QueueUnderTest]:
    async with server_queue(valkey_server.url, QueueSettings()) as under_test:
        await under_test.queue.mark_ready()
        yield under_test


def client_of(under_test: QueueUnderTest) -> Redis:
    assert isinstance(under_test.queue, RedisAdmissionQueue)
    return under_test.queue._client


async def hears(news: AsyncGenerator[None, None], what: Callable[[], Awaitable[object]]) -> object:
    """The answer of `what`, after which there were news."""
    answer = await what()
    await asyncio.wait_for(anext(news), ANSWER_S)
    return answer


async def test_what_is_queued_put_back_or_overdue_is_news_and_what_is_popped_is_none(
    under_test: QueueUnderTest,
) -> None:
    first, second = entry_of("a"), entry_of("b")
    async with aclosing(RedisQueueNews(client_of(under_test)).follow()) as news:
        await asyncio.wait_for(anext(news), ANSWER_S)  # the subscription stands: something may have been missed
        await hears(news, lambda: under_test.add(first, second))
        returned, overdue = await under_test.pop()
        silent = asyncio.ensure_future(anext(news))
        assert not (await asyncio.wait({silent}, timeout=QUIET_S))[0]
        await under_test.queue.return_many([returned])
        await asyncio.wait_for(silent, ANSWER_S)
        under_test.advance(QueueSettings().pop_hold.total_seconds() + 1)
        assert await hears(news, lambda: under_test.queue.reap_in_flight([MODEL])) == 1
    assert await under_test.contains(overdue.entry)


async def test_a_user_who_may_not_publish_queues_all_the_same(
    under_test: QueueUnderTest, valkey_server: LocalValkey
) -> None:
    client = client_of(under_test)
    as_mute = ("ACL", "SETUSER", "mute", "on", ">x", "resetchannels", "~*", "+@all")
    await client.execute_command(*as_mute)  # type: ignore[no-untyped-call]
    server = urlsplit(valkey_server.url)
    database = client.connection_pool.connection_kwargs["db"]
    async with Redis(
        host=server.hostname or "", port=server.port or 0, db=database, username="mute", password="x"
    ) as mute:
        with pytest.raises(NoPermissionError):
            await mute.publish(CHANNEL, "x")
        entry = entry_of("a")
        await RedisAdmissionQueue(mute, QueueSettings()).enqueue_many([entry])
    await client.acl_deluser("mute")
    assert await under_test.contains(entry)
