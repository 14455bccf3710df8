"""Classes go strictly in order, but of every 8 entries popped one is the oldest that waited too long."""

from state_store.model import PriorityClass
from tests.support.admission_queues import MODEL, QueueUnderTest, entry_of, room_of

INTERACTIVE, STANDARD, BATCH = PriorityClass


async def test_a_higher_class_goes_first_whatever_the_counters_say(under_test: QueueUnderTest) -> None:
    await under_test.add(entry_of("a", priority_class=BATCH), entry_of("b", prompt_tokens=900, priority_class=STANDARD))
    await under_test.queue.ack_many(await under_test.pop(max_entries=1))
    late = entry_of("b", arrived_ms=99, priority_class=INTERACTIVE)
    await under_test.add(late)
    assert await under_test.pop_entries(max_entries=1) == [late]


async def test_of_every_8_entries_one_is_the_oldest_that_waited_too_long(under_test: QueueUnderTest) -> None:
    urgent = [entry_of(arrived_ms=31_000 + ms, priority_class=INTERACTIVE) for ms in range(30)]
    older, newer = (entry_of(arrived_ms=ms, order_ms=-ms, priority_class=BATCH) for ms in (0, 1))
    await under_test.add(*urgent, newer, older)
    under_test.advance(31.1)
    popped = await under_test.pop_entries(max_entries=24)
    assert [popped.index(older), popped.index(newer)] == [7, 15]
    assert [entry for entry in popped if entry.priority_class is INTERACTIVE] == urgent[:22]


async def test_the_turn_is_counted_over_pops(under_test: QueueUnderTest) -> None:
    urgent = [entry_of(arrived_ms=31_000 + ms, priority_class=INTERACTIVE) for ms in range(20)]
    old = entry_of(priority_class=BATCH)
    await under_test.add(*urgent, old)
    under_test.advance(31.1)
    for _ in range(7):
        assert old not in await under_test.pop_entries(max_entries=1)
    assert await under_test.pop_entries(max_entries=1) == [old]


async def test_each_class_has_its_own_threshold_and_the_oldest_of_all_goes(under_test: QueueUnderTest) -> None:
    usual = entry_of(arrived_ms=20_000, priority_class=STANDARD)
    batch = entry_of(arrived_ms=10_000, priority_class=BATCH)
    urgent = [entry_of(arrived_ms=31_000 + ms, priority_class=INTERACTIVE) for ms in range(40)]
    await under_test.add(*urgent, usual, batch)
    under_test.advance(31)
    popped = await under_test.pop_entries(max_entries=8)  # STANDARD waits longer than 10 s, BATCH not than 30 s
    assert (popped[7], popped[:7]) == (usual, urgent[:7])
    await under_test.queue.return_many(await under_test.pop(max_entries=8))
    under_test.advance(9)
    popped = await under_test.pop_entries(max_entries=8)
    assert popped[7] == batch


async def test_what_waits_as_long_as_its_threshold_but_does_not_fit_leaves_the_turn_to_the_next(
    under_test: QueueUnderTest,
) -> None:
    urgent = [entry_of(arrived_ms=31_000 + ms, priority_class=INTERACTIVE) for ms in range(9)]
    large, small = (entry_of(arrived_ms=ms, max_tokens=size, priority_class=BATCH) for ms, size in ((0, 500), (1, 10)))
    await under_test.add(*urgent, large, small)
    under_test.advance(31.1)
    popped = await under_test.pop_entries(room_of(400), max_entries=9)
    assert popped == [*urgent[:7], small, urgent[7]]


async def test_without_an_old_entry_the_turn_changes_nothing(under_test: QueueUnderTest) -> None:
    urgent = [entry_of(arrived_ms=ms, priority_class=INTERACTIVE) for ms in range(9)]
    await under_test.add(entry_of(priority_class=BATCH), *urgent)
    assert await under_test.pop_entries(max_entries=9) == urgent
    assert (await under_test.queue.depth(MODEL)).requests == (0, 0, 1)
