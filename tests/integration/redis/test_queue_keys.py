"""How the admission queue uses the server: hash tags, leftovers, and its clock."""

from datetime import UTC, datetime, timedelta

from redis.asyncio import Redis
from redis.crc import key_slot

from scheduler.queue.port import QueueEntry, Room
from scheduler.queue.redis_queue import RedisAdmissionQueue
from scheduler.queue.settings import QueueSettings
from service_kit.ids import TenantId, new_generation_id
from state_store.model import ModelKey, PriorityClass
from tests.support.polling import eventually_answers

ROOM = Room(max_entries=10, max_tokens=(100,) * 3)


def _entry(model_key: ModelKey, deadline_at: datetime | None = None) -> QueueEntry:
    return QueueEntry(
        generation_id=new_generation_id(),
        attempt=0,
        model_key=model_key,
        tenant_id=TenantId("t"),
        priority_class=PriorityClass.STANDARD,
        prompt_tokens=1,
        max_tokens=1,
        arrived_at=datetime.now(UTC),
        deadline_at=deadline_at,
    )


async def test_all_keys_of_a_model_share_a_slot_whatever_its_revision_is_called(client: Redis) -> None:
    queue = RedisAdmissionQueue(client)
    await queue.mark_ready()
    for revision in ("sha256:ab", "}{", "a b"):
        model_key = ModelKey(revision=revision, precision="int8")
        await queue.enqueue_many([_entry(model_key), _entry(model_key)], is_bounded=True)
        await queue.pop(model_key, Room(max_entries=1, max_tokens=(100,) * 3))
    tags: dict[str, set[int]] = {}
    keys = [key for key in await client.keys("*") if key != b"queue:marker"]
    for key in keys:
        tags.setdefault(key.decode().partition("}")[0], set()).add(key_slot(key))
    assert len(keys) == 3 * 5
    assert len(tags) == 3
    assert all(len(slots) == 1 for slots in tags.values())


async def test_an_empty_queue_leaves_nothing_but_its_marker(client: Redis) -> None:
    queue, model_key = RedisAdmissionQueue(client), ModelKey(revision="r", precision="p")
    await queue.mark_ready()
    entries = [_entry(model_key) for _ in range(4)]
    await queue.enqueue_many([*entries, _entry(model_key, deadline_at=datetime.now(UTC))], is_bounded=True)
    popped = await queue.pop(model_key, ROOM)
    assert len(popped) == 4
    await queue.ack_many(popped[:2])
    await queue.return_many(popped[2:3])
    await queue.remove_many([(model_key, entry.generation_id) for entry in entries])
    assert sorted(await client.keys("*")) == [b"queue:marker", b"{q:r:p}:marker"]


async def test_the_servers_clock_decides_about_holds(client: Redis) -> None:
    queue = RedisAdmissionQueue(client, QueueSettings(pop_hold=timedelta(milliseconds=20)))
    model_key = ModelKey(revision="r", precision="p")
    await queue.mark_ready()
    await queue.enqueue_many([_entry(model_key)], is_bounded=True)
    assert len(await queue.pop(model_key, ROOM)) == 1
    assert await eventually_answers(lambda: queue.reap_in_flight([model_key])) == 1
    assert len(await queue.pop(model_key, ROOM)) == 1
