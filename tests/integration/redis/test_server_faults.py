"""What log, queue and subscription do about a server that is gone, silent, read-only, full, or has forgotten its scripts."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from scheduler.queue.errors import QueueUnavailableError
from scheduler.queue.redis_queue import RedisAdmissionQueue
from service_kit.delta import Cursor
from service_kit.ids import GatewayId, GenerationId, new_generation_id
from sluice.local.valkey import LocalValkey
from state_store.delta_log.port import AppendItem, AppendStatus, OpenItem, Push
from state_store.delta_log.redis_feed import FeedSettings, RedisFeed
from state_store.delta_log.redis_log import RedisDeltaLog
from state_store.errors import LogUnavailableError
from state_store.model import ModelKey
from tests.support.admission_queues import room_of
from tests.support.delta_logs import delta_after
from tests.support.polling import eventually, eventually_answers

MODEL = ModelKey(revision="r", precision="p")
GATEWAY = GatewayId("gw-1")
FIRST = delta_after(Cursor(), 1, 2)


async def _open(log: RedisDeltaLog) -> GenerationId:
    generation_id = new_generation_id()
    await log.open_many([OpenItem(generation_id=generation_id, attempt=1)])
    return generation_id


async def _append(log: RedisDeltaLog, generation_id: GenerationId) -> AppendStatus:
    (result,) = await log.append_many([AppendItem(generation_id=generation_id, attempt=1, delta=FIRST)])
    return result.status


async def _next(feed: AsyncIterator[Sequence[Push] | None]) -> Sequence[Push] | None:
    return await asyncio.wait_for(anext(feed), 10)


async def test_a_killed_server_is_unavailable_and_keeps_what_it_had(own_server: LocalValkey, own_client: Redis) -> None:
    log, queue = RedisDeltaLog(own_client), RedisAdmissionQueue(own_client)
    generation_id = await _open(log)
    await queue.mark_ready()
    own_server.kill()
    with pytest.raises(LogUnavailableError):
        await _append(log, generation_id)
    for call in (queue.pop(MODEL, [room_of()], max_entries=1), queue.is_ready(), queue.mark_ready()):
        with pytest.raises(QueueUnavailableError):
            await call
    own_server.start()
    assert await _append(log, generation_id) is AppendStatus.OK
    assert await queue.pop(MODEL, [room_of()], max_entries=1) == []


async def test_a_silent_server_is_unavailable_within_the_time_limit(own_server: LocalValkey, own_client: Redis) -> None:
    log, queue = RedisDeltaLog(own_client), RedisAdmissionQueue(own_client)
    generation_id = await _open(log)
    assert own_server.pid is not None
    os.kill(own_server.pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(5):
            with pytest.raises(LogUnavailableError):
                await _append(log, generation_id)
            with pytest.raises(QueueUnavailableError):
                await queue.depth(MODEL)
    finally:
        os.kill(own_server.pid, signal.SIGCONT)
    assert await _append(log, generation_id) in (AppendStatus.OK, AppendStatus.DUP)


async def test_a_read_only_server_is_unavailable(own_client: Redis) -> None:
    log = RedisDeltaLog(own_client)
    generation_id = await _open(log)
    await own_client.execute_command("REPLICAOF", "127.0.0.1", "1")
    try:
        with pytest.raises(LogUnavailableError):
            await _append(log, generation_id)
    finally:
        await own_client.execute_command("REPLICAOF", "NO", "ONE")
    assert await _append(log, generation_id) is AppendStatus.OK


async def test_a_full_server_is_unavailable_and_wrote_nothing(own_client: Redis) -> None:
    log, queue = RedisDeltaLog(own_client), RedisAdmissionQueue(own_client)
    generation_id = await _open(log)
    await own_client.config_set("maxmemory", "1")
    try:
        with pytest.raises(LogUnavailableError):
            await _append(log, generation_id)
        with pytest.raises(QueueUnavailableError):
            await queue.mark_ready()
    finally:
        await own_client.config_set("maxmemory", "0")
    assert await _append(log, generation_id) is AppendStatus.OK


async def test_forgotten_scripts_are_sent_again(own_client: Redis) -> None:
    log = RedisDeltaLog(own_client)
    generation_id = await _open(log)
    await own_client.script_flush()
    assert await _append(log, generation_id) is AppendStatus.OK
    assert await _append(log, generation_id) is AppendStatus.DUP


async def test_a_call_that_is_wrong_is_not_taken_for_an_outage(own_client: Redis) -> None:
    log = RedisDeltaLog(own_client)
    generation_id = new_generation_id()
    await own_client.set(f"log:{{s0}}:{generation_id}", "not a hash")
    with pytest.raises(ResponseError):
        await _append(log, generation_id)


class RecordedSleep:
    """Waits a hundredth of what it is asked for, and remembers it."""

    def __init__(self) -> None:
        self.asked_s: list[float] = []

    async def __call__(self, delay_s: float) -> None:
        self.asked_s.append(delay_s)
        await asyncio.sleep(delay_s / 100)


@asynccontextmanager
async def _followed(client: Redis, sleep: RecordedSleep) -> AsyncIterator[AsyncIterator[Sequence[Push] | None]]:
    settings = FeedSettings(ping_interval=timedelta(milliseconds=50))
    feed = RedisFeed(client, settings=settings, sleep=sleep, uniform=lambda _, high: high).follow(GATEWAY)
    try:
        assert await _next(feed) is None
        yield feed
    finally:
        await feed.aclose()


async def test_a_subscription_stands_again_after_a_restart_and_says_so(
    own_server: LocalValkey, own_client: Redis
) -> None:
    log, sleep = RedisDeltaLog(own_client), RecordedSleep()
    async with _followed(own_client, sleep) as feed:
        generation_id = await _open(log)
        own_server.kill()
        waiting = asyncio.create_task(_next(feed))
        await eventually(lambda: len(sleep.asked_s) >= 8)
        await asyncio.to_thread(own_server.start)
        assert await waiting is None
        assert sleep.asked_s[:8] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
        await log.attach_many(GATEWAY, [(generation_id, 0)])
        await _append(log, generation_id)
        batch = await _next(feed)
        assert batch is not None
        assert [push.delta for push in batch] == [FIRST]


async def test_a_subscription_leaves_a_server_that_answers_no_ping(own_server: LocalValkey, own_client: Redis) -> None:
    sleep = RecordedSleep()
    async with _followed(own_client, sleep) as feed:
        assert own_server.pid is not None
        waiting = asyncio.create_task(_next(feed))
        os.kill(own_server.pid, signal.SIGSTOP)
        try:
            await eventually(lambda: bool(sleep.asked_s))
        finally:
            os.kill(own_server.pid, signal.SIGCONT)
        assert await waiting is None


async def test_an_idle_subscription_stays(own_client: Redis) -> None:
    async def num_pings() -> int:
        return int((await own_client.info("commandstats")).get("cmdstat_ping", {"calls": 0})["calls"])

    async def has_pinged_since(before: int) -> bool:
        return await num_pings() >= before + 4

    log, sleep = RedisDeltaLog(own_client), RecordedSleep()
    async with _followed(own_client, sleep) as feed:
        waiting = asyncio.create_task(_next(feed))
        before = await num_pings()
        await eventually_answers(lambda: has_pinged_since(before))
        generation_id = new_generation_id()
        await log.attach_many(GATEWAY, [(generation_id, 0)])
        await log.open_many([OpenItem(generation_id=generation_id, attempt=1)])
        batch = await waiting
        assert batch is not None
        assert [push.generation_id for push in batch] == [generation_id]
        assert sleep.asked_s == []


async def test_a_closed_or_cancelled_subscription_gives_its_connection_back(own_client: Redis) -> None:
    log = RedisDeltaLog(own_client)
    for _ in range(6):  # more than the pool has connections
        feed = log.subscribe(GATEWAY)
        assert await _next(feed) is None
        waiting = asyncio.create_task(_next(feed))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    async def is_left() -> bool:
        return (await own_client.pubsub_numsub(f"log:gw:{GATEWAY}"))[0][1] == 0

    await eventually_answers(is_left)
