"""Entries of the admission queue come and go as the port says, on the memory twin and on every real server there is."""

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest

from scheduler.queue.errors import QueueNotReadyError
from scheduler.queue.port import EnqueueStatus
from service_kit.ids import new_generation_id
from state_store.model import ModelKey, PriorityClass
from tests.support.admission_queues import ARRIVAL, MODEL, OTHER_MODEL, QueueUnderTest, entry_of, room_of


async def test_entries_leave_by_class_then_order_then_id(under_test: QueueUnderTest) -> None:
    batch = entry_of(priority_class=PriorityClass.BATCH)
    late = entry_of(order_ms=2, arrived_ms=0)
    early, twin = sorted((entry_of(arrived_ms=1), entry_of(arrived_ms=1)), key=lambda entry: entry.generation_id)
    interactive = entry_of(arrived_ms=9, priority_class=PriorityClass.INTERACTIVE)
    assert await under_test.add(batch, late, twin, interactive, early) == [EnqueueStatus.ADDED] * 5
    depth = await under_test.queue.depth(MODEL)
    assert (depth.requests, depth.prompt_tokens, depth.num_queued) == ((1, 3, 1), (7, 21, 7), 5)
    assert (depth.delayed, depth.in_flight, depth.num_tenants) == (0, 0, 1)
    assert await under_test.pop_entries() == [interactive, early, twin, late, batch]
    assert await under_test.pop() == []
    depth = await under_test.queue.depth(MODEL)
    assert (depth.num_queued, depth.in_flight, depth.num_tenants) == (0, 5, 1)


async def test_an_entry_comes_out_as_it_went_in(under_test: QueueUnderTest) -> None:
    entry = entry_of(
        attempt=4,
        weight=2.5,
        order_ms=-5,
        prompt_tokens=1_000_000,
        deadline_at=ARRIVAL + timedelta(microseconds=7_654_321),
        ready_at=ARRIVAL - timedelta(microseconds=1),
        is_charged=True,
    )
    await under_test.add(entry)
    (popped,) = await under_test.pop(room_of(session="s-1"))
    assert (popped.entry, popped.session_id, popped.kept) == (entry, "s-1", frozenset())


async def test_models_do_not_share_a_queue(under_test: QueueUnderTest) -> None:
    ours, theirs = entry_of(), entry_of(model_key=OTHER_MODEL)
    await under_test.add(ours, theirs)
    assert await under_test.pop_entries() == [ours]
    assert await under_test.num_queued(OTHER_MODEL) == 1
    assert await under_test.pop_entries(model_key=OTHER_MODEL) == [theirs]


async def test_models_with_entries_are_known_whatever_became_of_their_sessions(under_test: QueueUnderTest) -> None:
    ours, theirs = entry_of(), entry_of(model_key=OTHER_MODEL)
    assert await under_test.queue.model_keys() == []
    await under_test.add(ours, theirs)
    await under_test.queue.remove_many([(OTHER_MODEL, theirs.generation_id)])
    assert await under_test.queue.model_keys() == [MODEL]
    popped = await under_test.pop()
    assert await under_test.queue.model_keys() == [MODEL]
    await under_test.queue.ack_many(popped)
    assert await under_test.queue.model_keys() == []


async def test_expired_entries_leave_every_structure_in_any_pop_or_depth(under_test: QueueUnderTest) -> None:
    head = entry_of(max_tokens=900)
    expired = [entry_of(arrived_ms=ms, deadline_at=ARRIVAL + timedelta(seconds=1)) for ms in (1, 2)]
    alive = entry_of(arrived_ms=3, deadline_at=ARRIVAL + timedelta(seconds=1, microseconds=1))
    delayed = entry_of(deadline_at=ARRIVAL + timedelta(seconds=1), ready_at=ARRIVAL + timedelta(hours=1))
    await under_test.add(head, *expired, alive, delayed)
    under_test.advance(1)
    depth = await under_test.queue.depth(MODEL)
    assert (depth.num_queued, depth.delayed) == (2, 0)
    assert [await under_test.contains(entry) for entry in (*expired, delayed)] == [False] * 3
    under_test.clock.advance(timedelta(microseconds=1))
    assert await under_test.pop_entries(room_of(10)) == []
    assert not await under_test.contains(alive)
    assert await under_test.contains(head)


async def test_what_is_in_flight_does_not_expire(under_test: QueueUnderTest) -> None:
    entry = entry_of(deadline_at=ARRIVAL + timedelta(seconds=1))
    await under_test.add(entry)
    popped = await under_test.pop()
    under_test.advance(2)
    assert await under_test.pop() == []
    assert await under_test.contains(entry)
    await under_test.queue.return_many(popped)
    assert await under_test.pop() == []
    assert not await under_test.contains(entry)


async def test_a_delayed_entry_counts_as_queued_and_returns_to_its_place(under_test: QueueUnderTest) -> None:
    delayed = entry_of(ready_at=ARRIVAL + timedelta(seconds=1))
    later = entry_of(arrived_ms=1)
    await under_test.add(delayed, later)
    depth = await under_test.queue.depth(MODEL)
    assert (depth.num_queued, depth.delayed) == (2, 1)
    assert await under_test.contains(delayed)
    assert await under_test.add(delayed) == [EnqueueStatus.PRESENT]
    popped = await under_test.pop()
    assert [each.entry for each in popped] == [later]
    await under_test.queue.return_many(popped)
    under_test.advance(1)
    assert await under_test.pop_entries() == [delayed, later]


async def test_a_delayed_entry_can_be_removed_and_replaced(under_test: QueueUnderTest) -> None:
    removed, replaced = (entry_of(attempt=1, ready_at=ARRIVAL + timedelta(seconds=1)) for _ in range(2))
    await under_test.add(removed, replaced)
    await under_test.queue.remove_many([(MODEL, removed.generation_id)])
    newer = replace(replaced, attempt=2, ready_at=None)
    await under_test.add(newer)
    under_test.advance(1)
    assert await under_test.pop_entries() == [newer]


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
    new = replace(old, attempt=2, priority_class=PriorityClass.BATCH, max_tokens=20, is_charged=True)
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
    await under_test.queue.drop_many(stale_pops)
    await under_test.queue.return_many(stale_pops)
    assert await under_test.num_queued() == 1
    under_test.advance(6)
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


@pytest.mark.parametrize("end", ["ack_many", "drop_many"])
async def test_an_ack_or_a_drop_forgets_the_entry(under_test: QueueUnderTest, end: str) -> None:
    entry = entry_of()
    await under_test.add(entry)
    popped = await under_test.pop()
    await getattr(under_test.queue, end)(popped)
    await getattr(under_test.queue, end)([*popped, *popped])
    under_test.advance(6)
    assert await under_test.queue.reap_in_flight([MODEL]) == 0
    assert not await under_test.contains(entry)
    assert await under_test.add(entry) == [EnqueueStatus.ADDED]


async def test_a_returned_entry_has_its_old_place(under_test: QueueUnderTest) -> None:
    first, second = entry_of(arrived_ms=1), entry_of(arrived_ms=2)
    await under_test.add(first, second)
    popped = await under_test.pop(max_entries=1)
    await under_test.queue.return_many([*popped, *popped])
    assert await under_test.num_queued() == 2
    assert await under_test.pop_entries() == [first, second]


async def test_only_the_pop_that_holds_an_entry_may_end_it(under_test: QueueUnderTest) -> None:
    entry = entry_of()
    await under_test.add(entry)
    first_pop = await under_test.pop()
    await under_test.queue.return_many(first_pop)
    second_pop = await under_test.pop()
    assert first_pop[0].pop_id != second_pop[0].pop_id
    await under_test.queue.ack_many(first_pop)
    await under_test.queue.drop_many(first_pop)
    await under_test.queue.return_many(first_pop)
    assert await under_test.contains(entry)
    assert await under_test.num_queued() == 0
    await under_test.queue.ack_many(second_pop)
    assert not await under_test.contains(entry)


async def test_reaping_puts_back_what_is_in_flight_for_longer_than_its_hold(under_test: QueueUnderTest) -> None:
    first, second = entry_of(), entry_of(arrived_ms=1)
    await under_test.add(first)
    late_pop = await under_test.pop()
    under_test.clock.advance(timedelta(seconds=3, microseconds=999_999))
    await under_test.add(second)
    await under_test.pop()
    assert await under_test.queue.reap_in_flight([MODEL, OTHER_MODEL]) == 0
    under_test.clock.advance(timedelta(microseconds=1))
    assert await under_test.queue.reap_in_flight([MODEL, MODEL, OTHER_MODEL]) == 1
    await under_test.queue.ack_many(late_pop)
    assert await under_test.pop_entries() == [first]


async def test_a_removed_generation_leaves_every_structure(under_test: QueueUnderTest) -> None:
    queued, in_flight, other = entry_of(arrived_ms=1), entry_of(), entry_of(model_key=OTHER_MODEL)
    await under_test.add(in_flight, queued, other)
    popped = await under_test.pop(max_entries=1)
    await under_test.queue.remove_many([(entry.model_key, entry.generation_id) for entry in (queued, in_flight, other)])
    await under_test.queue.remove_many([(MODEL, new_generation_id()), (MODEL, queued.generation_id)])
    await under_test.queue.return_many(popped)
    under_test.advance(6)
    assert await under_test.queue.reap_in_flight([MODEL, OTHER_MODEL]) == 0
    assert [await under_test.contains(entry) for entry in (queued, in_flight, other)] == [False] * 3
    for model_key in (MODEL, OTHER_MODEL):
        depth = await under_test.queue.depth(model_key)
        assert (depth.num_queued, depth.in_flight, depth.num_tenants) == (0, 0, 0)


async def test_concurrent_pops_share_nothing_and_their_ids_are_unique(under_test: QueueUnderTest) -> None:
    entries = [entry_of(arrived_ms=ms) for ms in range(40)]
    await under_test.add(*entries)
    popped = [
        pop for pops in await asyncio.gather(*(under_test.pop(room_of(entries=7)) for _ in range(8))) for pop in pops
    ]
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
        under_test.add(entry),
        under_test.pop(),
        queue.ack_many(popped),
        queue.drop_many(popped),
        queue.return_many(popped),
        queue.remove_many([key]),
        queue.contains_many([(*key, 0)]),
        queue.reap_in_flight([MODEL]),
        queue.depth(MODEL),
        queue.model_keys(),
    ):
        with pytest.raises(QueueNotReadyError):
            await refused
    assert await under_test.add(entry, is_rebuild=True) == [EnqueueStatus.ADDED]
    with pytest.raises(QueueNotReadyError):
        await under_test.pop()
    await queue.mark_ready()
    assert await queue.is_ready()
    assert await queue.model_keys() == [MODEL]
    assert await under_test.pop_entries() == [entry]


async def test_a_new_queue_is_not_ready(emptied: QueueUnderTest) -> None:
    assert not await emptied.queue.is_ready()
    with pytest.raises(QueueNotReadyError):
        await emptied.add(entry_of())


async def test_a_model_seen_for_the_first_time_needs_no_rebuild(under_test: QueueUnderTest) -> None:
    brand_new = ModelKey(revision="brand-new", precision="fp32")
    assert await under_test.pop(model_key=brand_new) == []
    assert await under_test.add(entry_of(model_key=brand_new)) == [EnqueueStatus.ADDED]
