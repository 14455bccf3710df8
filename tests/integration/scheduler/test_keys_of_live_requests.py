"""After any history the keys of queue, fairness and quotas are exactly those of the live requests; when idle, none is left."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.queue_keys import active_tenants, contents_of, counters_of, read_contents, without_history
from tests.support.quota_keys import KEPT_FOR_A_WHILE, read_quota_contents
from tests.support.request_history import History
from tests.support.request_world import World, running_world

NUM_STEPS = 2_000
EVENTS = {
    "submitted": 300,
    "attached": 20,
    "conflicts": 5,
    "refused": 20,
    "cancelled": 100,
    "expired": 50,
    "granted": 300,
    "completed": 250,
    "lost workers": 5,
    "unqueued": 20,
    "abandoned pops": 50,
    "abandoned reservations": 10,
    "given back": 10,
}
"""Enough of each."""
GLOBAL_KEYS = {b"queue:marker", b"queue:models"}


@pytest.fixture(params=["valkey", "redis"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    url = request.getfixturevalue(f"{request.param}_server").url
    async with running_world(url, tmp_path, seed=8) as world:
        yield world


async def compare(world: World) -> None:
    """Behind an empty pop, which sees what has expired and what is ripe."""
    await world.queue.pop(world.model_key, [], max_entries=0)
    now = world.now()
    live = [held for request in world.live.values() if (held := request.live_entry(now)) is not None]
    contents = await read_contents(world.redis, "{q:*")
    assert without_history(contents) == contents_of(live)
    assert contents.get("counters", {}).keys() == active_tenants(live)
    counters_of(contents)
    await compare_history(world)
    assert await read_quota_contents(world.redis, now=now) == world.book.contents(now)
    others = {key for key in await world.redis.keys("*") if not key.startswith((b"{q:", b"{quota:"))}
    assert others == GLOBAL_KEYS


async def compare_history(world: World) -> None:
    """What depends on the order of things: counters, skips, earmarks. The queue's memory twin has lived through the same."""
    contents, twin = await read_contents(world.redis, "{q:*"), world.queue.twin.state_of(world.model_key)
    assert contents.get("counters", {}) == twin.counters.active
    assert contents.get("idle_counters", {}) == twin.counters.idle
    assert contents["meta"].get("floor", 0) == twin.counters.floor
    assert contents.get("skipped", {}) == twin.skipped_since_us
    earmarks = {session: entry.decode() for session, entry in contents.get("earmarks", {}).items()}
    assert earmarks == twin.earmarks.entry_by_session
    assert contents.get("earmarked", {}).keys() == set(earmarks.values()) <= twin.skipped_since_us.keys()
    assert contents.get("earmark_leases", {}) == twin.earmarks.until_us_by_session


async def test_after_2000_random_steps_all_keys_are_exactly_those_of_the_live_requests(world: World) -> None:
    history, sizes = History(world), list[int]()
    for number in range(NUM_STEPS):
        await history.step()
        if number % 200 == 199:
            await compare(world)
            sizes.append(len(world.live))
    assert len(history.done) == len(EVENTS)
    assert all(history.done[event] >= least for event, least in EVENTS.items()), history.done
    assert sum(sizes) > 200, sizes
    await history.end_all()
    await compare(world)
    left = {key.decode().rpartition("}:")[2] for key in await world.redis.keys("{*")}
    queue = await read_contents(world.redis, "{q:*")
    assert queue.keys() == {"marker", "meta", "idle_counters"}
    assert queue["idle_counters"].keys() <= {"a", "b", "c"}
    assert {name for name in left - queue.keys() if not name.startswith(KEPT_FOR_A_WHILE)} == set()
