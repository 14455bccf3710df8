"""How the admission queue uses the server: hash tags, leftovers, and its clock."""

from datetime import UTC, datetime, timedelta

from redis.asyncio import Redis
from redis.crc import key_slot

from scheduler.queue.redis_queue import RedisAdmissionQueue
from scheduler.queue.settings import QueueSettings
from state_store.model import ModelKey
from tests.support.admission_queues import entry_of, room_of
from tests.support.polling import eventually_answers

MODEL = ModelKey(revision="r", precision="p")
GLOBAL_KEYS = [b"queue:marker", b"queue:models"]


async def test_all_keys_of_a_model_share_a_slot_whatever_it_and_its_tenants_are_called(client: Redis) -> None:
    queue = RedisAdmissionQueue(client)
    await queue.mark_ready()
    for revision in ("sha256:ab", "}{", "a b"):
        model_key = ModelKey(revision=revision, precision="int8")
        entries = [entry_of(tenant, model_key=model_key) for tenant in ("}x{y}:", "b:tenant", "")]
        await queue.enqueue_many([*entries, entry_of(model_key=model_key, deadline_at=datetime.now(UTC))])
        assert len(await queue.pop(model_key, [room_of()], max_entries=1)) == 1
    tags: dict[str, set[int]] = {}
    for key in await client.keys("*"):
        if key not in GLOBAL_KEYS:
            tags.setdefault(key.decode().partition("}")[0], set()).add(key_slot(key))
    assert len(tags) == 3
    assert all(len(slots) == 1 for slots in tags.values())


async def test_an_empty_queue_leaves_its_markers_and_what_fairness_remembers(client: Redis) -> None:
    queue = RedisAdmissionQueue(client)
    await queue.mark_ready()
    entries = [entry_of(tenant, model_key=MODEL) for tenant in "aabb"]
    await queue.enqueue_many([*entries, entry_of("c", model_key=MODEL, deadline_at=datetime.now(UTC))])
    popped = await queue.pop(MODEL, [room_of()], max_entries=10)
    assert len(popped) == 4
    await queue.ack_many(popped[:3])
    await queue.return_many(popped[3:])
    await queue.remove_many([(MODEL, entry.generation_id) for entry in entries])
    left = [*GLOBAL_KEYS, b"{q:r:p}:idle_counters", b"{q:r:p}:marker", b"{q:r:p}:meta"]
    assert sorted(await client.keys("*")) == sorted(left)
    assert await client.zrange("{q:r:p}:idle_counters", 0, -1) == [b"a"]  # b was refunded down to the floor


async def test_the_servers_clock_decides_about_holds(client: Redis) -> None:
    queue = RedisAdmissionQueue(client, QueueSettings(pop_hold=timedelta(milliseconds=20)))
    await queue.mark_ready()
    await queue.enqueue_many([entry_of(model_key=MODEL)])
    assert len(await queue.pop(MODEL, [room_of()], max_entries=1)) == 1
    assert await eventually_answers(lambda: queue.reap_in_flight([MODEL])) == 1
    assert len(await queue.pop(MODEL, [room_of()], max_entries=1)) == 1
