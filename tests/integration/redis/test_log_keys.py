"""How the delta log uses the server: keys, tags, expiry, messages, and its clock."""

from datetime import UTC, datetime, timedelta

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot

from service_kit.delta import Cursor
from service_kit.ids import GatewayId, GenerationId, new_generation_id
from sluice.local.valkey import LocalValkey
from state_store.delta_log.codec import unpack_pushes
from state_store.delta_log.connection import connect_redis
from state_store.delta_log.port import AppendItem, LogEnd, OpenItem, SealItem
from state_store.delta_log.redis_log import RedisDeltaLog
from state_store.delta_log.settings import LogSettings
from state_store.model import State
from tests.support.delta_logs import delta_after
from tests.support.polling import eventually_answers

GATEWAY = GatewayId("gw-keys")
ENDED = LogEnd(state=State.CANCELLED, output_tokens=1, prompt_tokens=1, cached_prompt_tokens=0)
HOUR_MS, MINUTE_MS = 3_600_000, 60_000


async def _expiries(client: Redis) -> dict[str, int]:
    """Ms until each key of the database expires, by the last part of its name."""
    return {key.decode().rpartition(":")[2]: await client.pttl(key) for key in await client.keys("*")}


async def test_every_key_expires_late_while_live_and_soon_after_the_end(client: Redis) -> None:
    log, generation_id = RedisDeltaLog(client), new_generation_id()
    await log.attach_many(GATEWAY, [(generation_id, 0)])
    assert HOUR_MS - MINUTE_MS < (await _expiries(client))["watchers"] <= HOUR_MS
    await log.open_many([OpenItem(generation_id=generation_id, attempt=1)])
    await log.append_many([AppendItem(generation_id=generation_id, attempt=1, delta=delta_after(Cursor(), 1))])
    live = await _expiries(client)
    assert live.keys() == {generation_id, "deltas", "watchers"}
    assert all(47 * HOUR_MS < left <= 48 * HOUR_MS for left in live.values())
    await log.seal_many([SealItem(generation_id=generation_id, attempt=1, terminal=ENDED)])
    ended = await _expiries(client)
    assert ended.keys() == live.keys()
    assert all(9 * MINUTE_MS < left <= 10 * MINUTE_MS for left in ended.values())


async def test_appends_renew_the_expiry_once_a_quarter_of_it_is_over(client: Redis) -> None:
    start = datetime.now(UTC)
    now = [start]
    log, generation_id = RedisDeltaLog(client, clock=lambda: now[0]), new_generation_id()
    await log.open_many([OpenItem(generation_id=generation_id, attempt=1)])
    keys = (f"log:{{s0}}:{generation_id}", f"log:{{s0}}:{generation_id}:deltas")
    end = Cursor()
    for hours, is_renewed in ((0, True), (11, False), (13, True)):
        for key in keys:
            await client.pexpire(key, MINUTE_MS)
        now[0] = start + timedelta(hours=hours)
        delta = delta_after(end, 1)
        await log.append_many([AppendItem(generation_id=generation_id, attempt=1, delta=delta)])
        end = delta.end
        assert all([(await client.pttl(key) > MINUTE_MS) == is_renewed for key in keys])


async def test_an_expired_log_is_absent(client: Redis) -> None:
    log = RedisDeltaLog(client, settings=LogSettings(terminal_retention=timedelta(milliseconds=1)))
    generation_id = new_generation_id()
    await log.open_many([OpenItem(generation_id=generation_id, attempt=1)])
    await log.seal_many([SealItem(generation_id=generation_id, attempt=1, terminal=ENDED)])

    async def is_gone() -> bool:
        return not (await log.read_many([(generation_id, 0)]))[0].is_present

    await eventually_answers(is_gone)
    assert await client.keys("*") == []


async def test_shards_and_split_calls_keep_the_order_of_items(client: Redis) -> None:
    log = RedisDeltaLog(client, num_shards=3, settings=LogSettings(max_items_per_call=4))
    ids = [new_generation_id() for _ in range(40)]
    await log.open_many([OpenItem(generation_id=each, attempt=1) for each in ids])
    deltas = [delta_after(Cursor(), *range(1, 2 + index % 5)) for index in range(40)]
    results = await log.append_many(
        [AppendItem(generation_id=each, attempt=1, delta=delta) for each, delta in zip(ids, deltas, strict=True)]
    )
    assert [result.end for result in results] == [delta.end for delta in deltas]
    views = await log.read_many([(each, 0) for each in ids])
    assert [(view.generation_id, view.deltas) for view in views] == [
        (each, (delta,)) for each, delta in zip(ids, deltas, strict=True)
    ]
    keys = [key.decode() for key in await client.keys("*")]
    assert len({key.partition("}")[0] for key in keys}) == 3
    for each in ids:
        assert len({key_slot(key.encode()) for key in keys if each in key}) == 1


async def test_a_log_needs_a_shard(client: Redis) -> None:
    with pytest.raises(ValueError, match="num_shards"):
        RedisDeltaLog(client, num_shards=0)


async def test_one_call_sends_each_gateway_one_message(client: Redis) -> None:
    log, ids = RedisDeltaLog(client), [new_generation_id() for _ in range(5)]
    for gateway in ("gw-a", "gw-b"):
        await log.attach_many(GatewayId(gateway), [(each, 0) for each in ids])
    async with client.pubsub() as listener:
        await listener.subscribe("log:gw:gw-a", "log:gw:gw-b")
        await log.open_many([OpenItem(generation_id=each, attempt=1) for each in ids])
        await log.append_many(
            [AppendItem(generation_id=each, attempt=1, delta=delta_after(Cursor(), 1, 2)) for each in ids]
        )
        await log.seal_many([SealItem(generation_id=each, attempt=1, terminal=ENDED) for each in ids])
        await client.publish("log:gw:gw-a", "end")
        messages = []
        while not messages or messages[-1]["data"] != b"end":
            message = await listener.get_message(ignore_subscribe_messages=True, timeout=5)
            if message is not None:
                messages.append(message)
    received = [(message["channel"].decode(), len(unpack_pushes(message["data"]))) for message in messages[:-1]]
    assert sorted(received) == [("log:gw:gw-a", 5)] * 3 + [("log:gw:gw-b", 5)] * 3


async def test_the_servers_clock_decides_about_leases(client: Redis) -> None:
    log = RedisDeltaLog(client, settings=LogSettings(watch_lease=timedelta(milliseconds=20)))
    generation_id = new_generation_id()
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    await log.attach_many(GATEWAY, [(generation_id, 0)])

    async def lease_end() -> datetime | None:
        seconds, microseconds = await client.time()
        asked_at = datetime.fromtimestamp(seconds, UTC) + timedelta(microseconds=microseconds)
        (last_watched,) = await log.last_watched_many([generation_id])
        return last_watched if last_watched and last_watched < asked_at - timedelta(milliseconds=1) else None

    ended_at = await eventually_answers(lease_end)
    assert ended_at is not None
    assert before + timedelta(milliseconds=20) <= ended_at <= datetime.now(UTC)


async def test_gone_watchers_are_forgotten_when_another_comes(client: Redis) -> None:
    now = [datetime.now(UTC)]
    log, generation_id = RedisDeltaLog(client, clock=lambda: now[0]), new_generation_id()
    for index in range(20):
        await log.attach_many(GatewayId(f"gw-{index}"), [(generation_id, 0)])
        now[0] += timedelta(seconds=16)
    assert await client.zcard(f"log:{{s0}}:{generation_id}:watchers") == 1


async def test_whoever_watches_an_ended_log_is_forgotten_with_it(client: Redis) -> None:
    log, generation_id = RedisDeltaLog(client), new_generation_id()
    await log.open_many([OpenItem(generation_id=generation_id, attempt=1)])
    await log.append_many([AppendItem(generation_id=generation_id, attempt=1, delta=delta_after(Cursor(), 1))])
    await log.seal_many([SealItem(generation_id=generation_id, attempt=1, terminal=ENDED)])
    await log.attach_many(GATEWAY, [(generation_id, 0)])
    await log.watch_many(GATEWAY, [generation_id])
    ended = await _expiries(client)
    assert ended.keys() == {generation_id, "deltas", "watchers"}
    assert all(9 * MINUTE_MS < left <= 10 * MINUTE_MS for left in ended.values())


async def test_the_schedulers_own_user_may_look_for_unsealed_logs_and_drop_them(valkey_server: LocalValkey) -> None:
    client = connect_redis(valkey_server.url_of("scheduler"))
    log, generation_id = RedisDeltaLog(client), new_generation_id()
    await log.open_many([OpenItem(generation_id=generation_id, attempt=1)])
    found: list[GenerationId] = []
    place = 0
    while True:
        page, place = await log.unsealed_page(place, limit=1000)
        found += page
        if not place:
            break
    assert generation_id in found
    await log.drop_many([generation_id])
    assert not (await log.read_many([(generation_id, 0)]))[0].is_present
    await client.aclose()
