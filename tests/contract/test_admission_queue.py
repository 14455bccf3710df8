"""Rules of the admission queue, on the memory twin and on real Valkey."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from scheduler.queue.errors import QueueNotReadyError
from scheduler.queue.memory import MemoryAdmissionQueue
from scheduler.queue.port import EnqueueStatus, Popped, QueueEntry, Room
from scheduler.queue.redis_queue import RedisAdmissionQueue
from scheduler.queue.settings import QueueSettings
from service_kit.ids import GenerationId, TenantId, new_generation_id
from sluice.local.valkey import LocalValkey
from state_store.delta_log.connection import connect_redis
from state_store.model import ModelKey, PriorityClass
from tests.support.clock import SteppedClock
from tests.support.delta_logs import QUEUE_DATABASE, database_url

MODEL = ModelKey(revision="sha256:{ab}:1", precision="int8")
OTHER_MODEL = ModelKey(revision="sha256:cd", precision="int8")
ARRIVAL = datetime(2030, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)
BIG_ROOM = Room(max_entries=100, max_tokens=(1_000_000,) * 3)
SETTINGS = QueueSettings(max_entries=3)


class QueueUnderTest:
    def __init__(self, queue: MemoryAdmissionQueue | RedisAdmissionQueue, clock: SteppedClock) -> None:
        self.queue = queue
        self.clock = clock

    async def lose_all(self) -> None:
        if isinstance(self.queue, MemoryAdmissionQueue):
            self.queue.lose_all()
        else:
            await self.queue._client.flushdb()

    async def add(self, *entries: QueueEntry, is_bounded: bool = False) -> list[EnqueueStatus]:
        return await self.queue.enqueue_many(entries, is_bounded=is_bounded)

    async def pop(self, room: Room = BIG_ROOM, model_key: ModelKey = MODEL) -> list[Popped]:
        return await self.queue.pop(model_key, room)

    async def pop_entries(self, room: Room = BIG_ROOM, model_key: ModelKey = MODEL) -> list[QueueEntry]:
        return [popped.entry for popped in await self.pop(room, model_key)]

    async def contains(self, entry: QueueEntry) -> bool:
        return (await self.queue.contains_many([(entry.model_key, entry.generation_id, entry.attempt)]))[0]

    async def num_queued(self, model_key: ModelKey = MODEL) -> int:
        return sum((await self.queue.depth(model_key)).values())


@pytest.fixture(params=["memory", "valkey"])
async def emptied(request: pytest.FixtureRequest) -> AsyncIterator[QueueUnderTest]:
    clock = SteppedClock(ARRIVAL)
    if request.param == "memory":
        yield QueueUnderTest(MemoryAdmissionQueue(clock, SETTINGS), clock)
        return
    server: LocalValkey = request.getfixturevalue("valkey_server")
    client = connect_redis(database_url(server.url, QUEUE_DATABASE))
    try:
        await client.flushdb()
        yield QueueUnderTest(RedisAdmissionQueue(client, SETTINGS, clock=clock), clock)
    finally:
        await client.aclose()


@pytest.fixture
async def under_test(emptied: QueueUnderTest) -> QueueUnderTest:
    await emptied.queue.mark_ready()
    return emptied


def entry_of(
    *,
    arrived_ms: int = 0,
    attempt: int = 0,
    max_tokens: int = 10,
    priority_class: PriorityClass = PriorityClass.STANDARD,
    model_key: ModelKey = MODEL,
    deadline_at: datetime | None = None,
    generation_id: GenerationId | None = None,
    is_charged: bool = False,
) -> QueueEntry:
    return QueueEntry(
        generation_id=generation_id or new_generation_id(),
        attempt=attempt,
        model_key=model_key,
        tenant_id=TenantId("tenant-é"),
        priority_class=priority_class,
        prompt_tokens=7,
        max_tokens=max_tokens,
        arrived_at=ARRIVAL + timedelta(milliseconds=arrived_ms),
        deadline_at=deadline_at,
        is_charged=is_charged,
    )


async def test_entries_leave_by_class_then_arrival_then_id(under_test: QueueUnderTest) -> None:
    batch = entry_of(priority_class=PriorityClass.BATCH)
    late = entry_of(arrived_ms=2)
    early, twin = sorted((entry_of(arrived_ms=1), entry_of(arrived_ms=1)), key=lambda entry: entry.generation_id)
    interactive = entry_of(arrived_ms=9, priority_class=PriorityClass.INTERACTIVE)
    assert await under_test.add(batch, late, twin, interactive, early) == [EnqueueStatus.ADDED] * 5
    assert await under_test.queue.depth(MODEL) == {
        PriorityClass.INTERACTIVE: 1,
        PriorityClass.STANDARD: 3,
        PriorityClass.BATCH: 1,
    }
    assert await under_test.pop_entries() == [interactive, early, twin, late, batch]
    assert await under_test.pop() == []
    assert await under_test.num_queued() == 0


async def test_an_entry_comes_out_as_it_went_in(under_test: QueueUnderTest) -> None:
    entry = entry_of(attempt=4, deadline_at=ARRIVAL + timedelta(microseconds=7_654_321))
    await under_test.add(entry)
    assert await under_test.pop_entries() == [entry]


async def test_arrivals_of_one_millisecond_leave_by_id(under_test: QueueUnderTest) -> None:
    first, second = sorted((entry_of(), entry_of()), key=lambda entry: entry.generation_id)
    first = replace(first, arrived_at=ARRIVAL + timedelta(microseconds=5))
    await under_test.add(second, first)
    assert await under_test.pop_entries() == [first, second]


async def test_models_do_not_share_a_queue(under_test: QueueUnderTest) -> None:
    ours, theirs = entry_of(), entry_of(model_key=OTHER_MODEL)
    await under_test.add(ours, theirs)
    assert await under_test.pop_entries() == [ours]
    assert await under_test.num_queued(OTHER_MODEL) == 1
    assert await under_test.pop_entries(model_key=OTHER_MODEL) == [theirs]


async def test_a_pop_takes_no_more_entries_than_there_is_room_for(under_test: QueueUnderTest) -> None:
    entries = [entry_of(arrived_ms=ms) for ms in range(150)]
    await under_test.add(*entries)
    assert await under_test.pop(Room(max_entries=0, max_tokens=(1000,) * 3)) == []
    assert await under_test.pop_entries(Room(max_entries=70, max_tokens=(10_000,) * 3)) == entries[:70]
    assert await under_test.pop_entries(Room(max_entries=100, max_tokens=(10_000,) * 3)) == entries[70:]


async def test_a_pop_ends_at_the_first_entry_that_does_not_fit(under_test: QueueUnderTest) -> None:
    first, second, third = (entry_of(arrived_ms=ms, max_tokens=tokens) for ms, tokens in ((0, 60), (1, 50), (2, 10)))
    lower = entry_of(priority_class=PriorityClass.BATCH, max_tokens=1)
    await under_test.add(first, second, third, lower)
    assert await under_test.pop(Room(max_entries=9, max_tokens=(59,) * 3)) == []
    assert await under_test.pop_entries(Room(max_entries=9, max_tokens=(109,) * 3)) == [first]
    assert await under_test.pop_entries(Room(max_entries=9, max_tokens=(61,) * 3)) == [second, third, lower]


async def test_each_class_has_its_own_room_and_higher_ones_use_it_up(under_test: QueueUnderTest) -> None:
    urgent, usual, batch = (entry_of(priority_class=each, max_tokens=50) for each in PriorityClass)
    await under_test.add(urgent, usual, batch)
    assert await under_test.pop_entries(Room(max_entries=9, max_tokens=(50, 99, 99))) == [urgent]
    assert await under_test.pop(Room(max_entries=9, max_tokens=(1000, 49, 49))) == []
    assert await under_test.pop_entries(Room(max_entries=9, max_tokens=(1000, 50, 99))) == [usual]
    assert await under_test.pop_entries(Room(max_entries=9, max_tokens=(0, 0, 50))) == [batch]


async def test_expired_entries_leave_every_structure_at_a_pop(under_test: QueueUnderTest) -> None:
    expired = entry_of(deadline_at=ARRIVAL + timedelta(seconds=1), max_tokens=900)
    alive = entry_of(arrived_ms=1, deadline_at=ARRIVAL + timedelta(seconds=1, milliseconds=1))
    await under_test.add(expired, alive)
    under_test.clock.advance(timedelta(seconds=1))
    assert await under_test.pop_entries(Room(max_entries=9, max_tokens=(10,) * 3)) == [alive]
    assert not await under_test.contains(expired)
    assert await under_test.num_queued() == 0


async def test_the_bound_of_a_class_refuses_new_entries_but_not_requeues(under_test: QueueUnderTest) -> None:
    entries = [entry_of(arrived_ms=ms) for ms in range(4)]
    added, full = EnqueueStatus.ADDED, EnqueueStatus.FULL
    assert await under_test.add(*entries, is_bounded=True) == [added, added, added, full]
    assert not await under_test.contains(entries[3])
    assert await under_test.add(entry_of(priority_class=PriorityClass.BATCH), is_bounded=True) == [added]
    assert await under_test.add(entry_of(model_key=OTHER_MODEL), is_bounded=True) == [added]
    assert await under_test.add(entries[3], is_bounded=False) == [added]
    assert await under_test.add(replace(entries[0], attempt=1), is_bounded=True) == [full]
    assert await under_test.contains(entries[0])
    await under_test.pop(Room(max_entries=2, max_tokens=(1000,) * 3))
    assert await under_test.add(entry_of(), is_bounded=True) == [added]


async def test_a_replacement_takes_the_place_it_frees(under_test: QueueUnderTest) -> None:
    entries = [entry_of(arrived_ms=ms) for ms in range(3)]
    await under_test.add(*entries)
    assert await under_test.add(replace(entries[1], attempt=1), is_bounded=True) == [EnqueueStatus.ADDED]
    assert await under_test.num_queued() == 3


async def test_an_attempt_that_is_queued_or_in_flight_is_present(under_test: QueueUnderTest) -> None:
    entry = entry_of(attempt=2)
    await under_test.add(entry)
    lower = replace(entry, attempt=1, priority_class=PriorityClass.INTERACTIVE)
    assert await under_test.add(entry, lower) == [EnqueueStatus.PRESENT] * 2
    (popped,) = await under_test.pop()
    assert await under_test.add(entry, lower) == [EnqueueStatus.PRESENT] * 2
    assert popped.entry == entry
    assert await under_test.num_queued() == 0


async def test_a_newer_attempt_replaces_a_queued_one_in_every_structure(under_test: QueueUnderTest) -> None:
    old = entry_of(attempt=1)
    new = replace(old, attempt=2, priority_class=PriorityClass.BATCH, max_tokens=20)
    await under_test.add(old)
    assert await under_test.add(new) == [EnqueueStatus.ADDED]
    assert [await under_test.contains(old), await under_test.contains(new)] == [False, True]
    assert await under_test.pop_entries() == [new]


async def test_a_newer_attempt_replaces_one_in_flight_and_its_pop_counts_no_more(under_test: QueueUnderTest) -> None:
    old = entry_of(attempt=1)
    new = replace(old, attempt=2)
    await under_test.add(old)
    stale_pops = await under_test.pop()
    await under_test.add(new)
    await under_test.queue.ack_many(stale_pops)
    await under_test.queue.return_many(stale_pops)
    assert await under_test.num_queued() == 1
    under_test.clock.advance(timedelta(seconds=6))
    assert await under_test.queue.reap_in_flight([MODEL]) == 0
    assert await under_test.pop_entries() == [new]


async def test_contains_means_exactly_this_attempt_queued_or_in_flight(under_test: QueueUnderTest) -> None:
    entry = entry_of(attempt=1)
    await under_test.add(entry)
    for _ in range(2):
        asked = [(MODEL, entry.generation_id, 1), (MODEL, entry.generation_id, 0), (MODEL, entry.generation_id, 2)]
        elsewhere = [(OTHER_MODEL, entry.generation_id, 1), (MODEL, new_generation_id(), 1)]
        assert await under_test.queue.contains_many([*asked, *elsewhere]) == [True, False, False, False, False]
        await under_test.pop()


async def test_an_ack_forgets_the_entry(under_test: QueueUnderTest) -> None:
    entry = entry_of()
    await under_test.add(entry)
    popped = await under_test.pop()
    await under_test.queue.ack_many(popped)
    await under_test.queue.ack_many(popped)
    under_test.clock.advance(timedelta(seconds=6))
    assert await under_test.queue.reap_in_flight([MODEL]) == 0
    assert not await under_test.contains(entry)
    assert await under_test.add(entry) == [EnqueueStatus.ADDED]


async def test_a_returned_entry_has_its_old_place(under_test: QueueUnderTest) -> None:
    first, second = entry_of(arrived_ms=1), entry_of(arrived_ms=2)
    await under_test.add(first, second)
    popped = await under_test.pop(Room(max_entries=1, max_tokens=(100,) * 3))
    await under_test.queue.return_many(popped)
    assert await under_test.pop_entries() == [first, second]


async def test_only_the_pop_that_holds_an_entry_may_ack_or_return_it(under_test: QueueUnderTest) -> None:
    entry = entry_of()
    await under_test.add(entry)
    first_pop = await under_test.pop()
    await under_test.queue.return_many(first_pop)
    second_pop = await under_test.pop()
    assert first_pop[0].pop_id != second_pop[0].pop_id
    await under_test.queue.ack_many(first_pop)
    await under_test.queue.return_many(first_pop)
    assert await under_test.contains(entry)
    assert await under_test.num_queued() == 0
    await under_test.queue.ack_many(second_pop)
    assert not await under_test.contains(entry)


async def test_reaping_puts_back_what_is_in_flight_for_longer_than_its_hold(under_test: QueueUnderTest) -> None:
    first, second = entry_of(), entry_of(arrived_ms=1)
    await under_test.add(first)
    late_pop = await under_test.pop()
    under_test.clock.advance(timedelta(seconds=3, milliseconds=999))
    await under_test.add(second)
    await under_test.pop()
    assert await under_test.queue.reap_in_flight([MODEL, OTHER_MODEL]) == 0
    under_test.clock.advance(timedelta(milliseconds=1))
    assert await under_test.queue.reap_in_flight([MODEL, MODEL, OTHER_MODEL]) == 1
    await under_test.queue.ack_many(late_pop)
    assert await under_test.pop_entries() == [first]


async def test_a_removed_generation_leaves_every_structure(under_test: QueueUnderTest) -> None:
    queued, in_flight, other = entry_of(arrived_ms=1), entry_of(), entry_of(model_key=OTHER_MODEL)
    await under_test.add(in_flight, queued, other)
    popped = await under_test.pop(Room(max_entries=1, max_tokens=(100,) * 3))
    await under_test.queue.remove_many([(entry.model_key, entry.generation_id) for entry in (queued, in_flight, other)])
    await under_test.queue.remove_many([(MODEL, new_generation_id()), (MODEL, queued.generation_id)])
    await under_test.queue.return_many(popped)
    under_test.clock.advance(timedelta(seconds=6))
    assert await under_test.queue.reap_in_flight([MODEL, OTHER_MODEL]) == 0
    assert [await under_test.contains(entry) for entry in (queued, in_flight, other)] == [False] * 3
    assert [await under_test.num_queued(), await under_test.num_queued(OTHER_MODEL)] == [0, 0]


async def test_concurrent_pops_share_nothing_and_their_ids_are_unique(under_test: QueueUnderTest) -> None:
    entries = [entry_of(arrived_ms=ms) for ms in range(40)]
    await under_test.add(*entries)
    room = Room(max_entries=7, max_tokens=(1000,) * 3)
    popped = [pop for pops in await asyncio.gather(*(under_test.pop(room) for _ in range(8))) for pop in pops]
    assert sorted(pop.entry.generation_id for pop in popped) == sorted(entry.generation_id for entry in entries)
    assert len({pop.pop_id for pop in popped}) == 40


async def test_everything_but_a_rebuild_is_refused_until_the_emptied_queue_is_marked_ready(
    under_test: QueueUnderTest,
) -> None:
    queue, entry = under_test.queue, entry_of()
    await under_test.add(entry)
    popped = await under_test.pop()
    assert await queue.is_ready()
    await under_test.lose_all()
    assert not await queue.is_ready()
    key = MODEL, entry.generation_id
    for refused in (
        under_test.add(entry, is_bounded=True),
        under_test.pop(),
        queue.ack_many(popped),
        queue.return_many(popped),
        queue.remove_many([key]),
        queue.contains_many([(*key, 0)]),
        queue.reap_in_flight([MODEL]),
        queue.depth(MODEL),
    ):
        with pytest.raises(QueueNotReadyError):
            await refused
    assert await under_test.add(entry) == [EnqueueStatus.ADDED]
    with pytest.raises(QueueNotReadyError):
        await under_test.pop()
    await queue.mark_ready()
    assert await queue.is_ready()
    assert await under_test.pop_entries() == [entry]


async def test_a_new_queue_is_not_ready(emptied: QueueUnderTest) -> None:
    assert not await emptied.queue.is_ready()
    with pytest.raises(QueueNotReadyError):
        await emptied.add(entry_of(), is_bounded=True)


async def test_a_model_seen_for_the_first_time_needs_no_rebuild(under_test: QueueUnderTest) -> None:
    brand_new = ModelKey(revision="brand-new", precision="fp32")
    assert await under_test.pop(model_key=brand_new) == []
    assert await under_test.add(entry_of(model_key=brand_new), is_bounded=True) == [EnqueueStatus.ADDED]


async def test_charged_entries_beyond_their_number_are_overtaken_and_keep_their_place(
    under_test: QueueUnderTest,
) -> None:
    charged = [entry_of(arrived_ms=number, is_charged=True) for number in range(70)]
    fresh = [entry_of(arrived_ms=100), entry_of(arrived_ms=101, priority_class=PriorityClass.BATCH)]
    await under_test.add(*charged, *fresh)
    assert await under_test.pop_entries(replace(BIG_ROOM, max_charged=0)) == fresh
    assert await under_test.pop_entries(BIG_ROOM) == charged[:1]
    await under_test.add(late := entry_of(arrived_ms=200))
    assert await under_test.pop_entries(replace(BIG_ROOM, max_charged=2)) == [*charged[1:3], late]
    assert await under_test.num_queued() == 67
