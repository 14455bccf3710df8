"""What fits where: room of sessions by class, heads that are looked past, earmarks, charged entries."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from scheduler.queue.port import QueueEntry
from scheduler.queue.settings import QueueSettings
from state_store.model import PriorityClass
from tests.support.admission_queues import ARRIVAL, MODEL, OTHER_MODEL, QueueUnderTest, entry_of, room_of

INTERACTIVE, STANDARD, BATCH = PriorityClass


async def test_a_pop_takes_no_more_entries_than_asked_for_or_than_there_is_room_for(under_test: QueueUnderTest) -> None:
    entries = [entry_of(arrived_ms=ms) for ms in range(150)]
    await under_test.add(*entries)
    assert await under_test.pop(room_of(entries=0)) == []
    assert await under_test.queue.pop(MODEL, [], max_entries=9) == []
    assert await under_test.pop_entries(room_of(entries=70)) == entries[:70]
    assert await under_test.pop_entries(max_entries=20) == entries[70:90]
    assert await under_test.pop_entries(room_of(99)) == entries[90:99]
    assert await under_test.pop_entries() == entries[99:]


async def test_a_pop_may_take_thousands(under_test: QueueUnderTest) -> None:
    entries = [entry_of(arrived_ms=ms, deadline_at=ARRIVAL + timedelta(hours=1)) for ms in range(2500)]
    await under_test.add(*entries)
    assert await under_test.pop_entries(room_of(entries=2500), max_entries=2500) == entries
    depth = await under_test.queue.depth(MODEL)
    assert (depth.num_queued, depth.in_flight) == (0, 2500)


async def test_what_does_not_fit_is_looked_past_and_keeps_its_place(under_test: QueueUnderTest) -> None:
    first, second, third = (entry_of(arrived_ms=ms, max_tokens=tokens) for ms, tokens in ((0, 60), (1, 50), (2, 10)))
    lower = entry_of(priority_class=BATCH, max_tokens=5)
    await under_test.add(first, second, third, lower)
    assert await under_test.pop_entries(room_of(59)) == [second, lower]
    assert await under_test.pop_entries(room_of(59)) == [third]
    assert await under_test.pop_entries(room_of(60)) == [first]


async def test_each_class_has_its_own_room_and_all_that_is_popped_uses_it_up(under_test: QueueUnderTest) -> None:
    urgent, usual, batch = (entry_of(priority_class=each, max_tokens=50) for each in PriorityClass)
    await under_test.add(urgent, usual, batch)
    assert await under_test.pop_entries(room_of((50, 99, 99))) == [urgent]
    assert await under_test.pop(room_of((1000, 49, 49))) == []
    assert await under_test.pop_entries(room_of((1000, 50, 99))) == [usual]
    assert await under_test.pop_entries(room_of((50, 50, 50))) == [batch]


async def test_each_class_has_its_own_number_of_entries(under_test: QueueUnderTest) -> None:
    urgent = [entry_of(arrived_ms=ms, priority_class=INTERACTIVE) for ms in range(3)]
    usual = [entry_of(arrived_ms=ms, priority_class=STANDARD) for ms in range(3)]
    await under_test.add(*urgent, *usual)
    assert await under_test.pop_entries(room_of(entries=(2, 1, 1))) == urgent[:2]
    assert await under_test.pop_entries(room_of(entries=(3, 2, 0))) == [urgent[2], usual[0]]
    assert await under_test.pop_entries(room_of(entries=(0, 9, 9))) == usual[1:]


async def test_an_entry_goes_to_the_session_with_most_tokens_left_where_it_fits(under_test: QueueUnderTest) -> None:
    entries = [entry_of(arrived_ms=ms, max_tokens=tokens) for ms, tokens in enumerate((40, 40, 10, 70, 10))]
    await under_test.add(*entries)
    rooms = [room_of(100, session="a"), room_of(120, session="b"), room_of(500, session="full", entries=0)]
    popped = await under_test.pop(*rooms)
    assert [(pop.entry, pop.session_id) for pop in popped] == [
        (entries[0], "b"),
        (entries[1], "a"),
        (entries[2], "b"),
        (entries[3], "b"),
        (entries[4], "a"),
    ]


async def test_a_pop_looks_past_4_heads_of_a_tenant_and_8_in_all(under_test: QueueUnderTest) -> None:
    large = [entry_of(tenant, arrived_ms=ms, max_tokens=50) for tenant in "abc" for ms in range(4)]
    small = [entry_of(tenant, arrived_ms=9, max_tokens=1) for tenant in "abcd"]
    await under_test.add(*large[:4], small[0])
    assert await under_test.pop_entries(room_of(49)) == [small[0]]  # the fifth of a tenant is still looked at
    await under_test.add(entry_of("a", arrived_ms=5, max_tokens=50), entry_of("a", arrived_ms=9, max_tokens=1))
    assert await under_test.pop_entries(room_of(49)) == []
    await under_test.add(*large[4:8], small[1])
    assert await under_test.pop_entries(room_of(49)) == [small[1]]
    await under_test.add(*large[8:], small[2], small[3])
    assert await under_test.pop_entries(room_of(49)) == small[2:]  # behind c's fourth, the eighth in all
    await under_test.add(entry_of("c", arrived_ms=9, max_tokens=1))
    assert await under_test.pop_entries(room_of(49)) == []  # b's four are looked past before c's first
    assert set(await under_test.pop_entries(room_of(50))) == {large[0]}


async def test_what_fits_no_session_even_when_empty_does_not_use_up_the_look_past(under_test: QueueUnderTest) -> None:
    stranded = [entry_of("ab"[ms % 2], arrived_ms=ms, max_tokens=200) for ms in range(20)]
    small = entry_of("a", arrived_ms=99, max_tokens=1)
    await under_test.add(*stranded, small)
    assert await under_test.pop_entries(room_of(100, capacity=199)) == [small]
    assert await under_test.pop(room_of(100, capacity=200)) == []
    under_test.advance(2)
    assert await under_test.pop(room_of(100, capacity=200, session="large")) == []
    other = entry_of("c", max_tokens=1)
    await under_test.add(other)
    # The session is kept for what was skipped all along.
    assert await under_test.pop(room_of(100, session="large", capacity=200)) == []
    assert await under_test.pop_entries(room_of(200, session="large", capacity=200)) == [stranded[1]]


async def test_many_that_wait_for_a_larger_session_close_their_tenant_and_no_other(under_test: QueueUnderTest) -> None:
    num_passed = QueueSettings().max_oversized
    stranded = [entry_of("a", arrived_ms=ms, max_tokens=200) for ms in range(num_passed + 1)]
    own, others = entry_of("a", arrived_ms=999, max_tokens=1), entry_of("b", max_tokens=1)
    await under_test.add(*stranded, own, others)
    assert await under_test.pop_entries(room_of(100, capacity=199)) == [others]
    await under_test.queue.remove_many([(MODEL, stranded[0].generation_id)])
    assert await under_test.pop_entries(room_of(100, capacity=199)) == [own]


# -- earmarks


async def skipped_head(under_test: QueueUnderTest, *, tokens: int = 90, **changes: Any) -> QueueEntry:
    """An entry that has been skipped for 2 s by the session "s" of 100 tokens, which is kept for it from now on."""
    head = entry_of("head", max_tokens=tokens, **changes)
    await under_test.add(head)
    assert await under_test.pop(room_of(50, session="s", capacity=100)) == []
    under_test.advance(2)
    assert await under_test.pop(room_of(50, session="s", capacity=100)) == []
    return head


def small_entry(**changes: Any) -> QueueEntry:
    return entry_of("small", max_tokens=10, **changes)


async def test_a_head_skipped_for_2_s_keeps_a_session_until_it_fits_there(under_test: QueueUnderTest) -> None:
    head = entry_of("head", max_tokens=90)
    await under_test.add(head)
    room = room_of(50, session="s", capacity=100)
    for number in range(4):
        small = small_entry(arrived_ms=number)
        await under_test.add(small)
        assert await under_test.pop_entries(room) == [small]
        under_test.advance(0.5)
    waiting = [small_entry(arrived_ms=number) for number in range(3)]
    await under_test.add(*waiting)
    assert await under_test.pop(room) == []  # from this pop on
    assert await under_test.pop(replace(room, max_tokens=(89,) * 3)) == []
    popped = await under_test.pop_entries(replace(room, max_tokens=(100,) * 3))
    assert popped == [head, waiting[0]]


async def test_a_kept_session_takes_higher_classes_and_nothing_else_of_its_class_or_lower(
    under_test: QueueUnderTest,
) -> None:
    await skipped_head(under_test)
    urgent, usual, batch = (small_entry(priority_class=each) for each in PriorityClass)
    await under_test.add(urgent, usual, batch)
    assert await under_test.pop_entries(room_of(50, session="s", capacity=100)) == [urgent]
    popped = await under_test.pop(room_of(50, session="s", capacity=100), room_of(50, session="other", capacity=60))
    assert [(pop.entry, pop.session_id, pop.kept) for pop in popped] == [
        (usual, "other", {"s"}),
        (batch, "other", {"s"}),
    ]


async def test_a_session_that_is_kept_in_this_very_pop_is_named(under_test: QueueUnderTest) -> None:
    head, batch = entry_of("head", max_tokens=90), small_entry(priority_class=BATCH)
    urgent = small_entry(priority_class=INTERACTIVE)
    await under_test.add(head)
    rooms = room_of(50, session="s", capacity=100), room_of(40, session="t", capacity=80)
    assert await under_test.pop(*rooms) == []
    under_test.advance(2)
    await under_test.add(batch, urgent)
    popped = await under_test.pop(*rooms)
    assert [(pop.entry, pop.session_id, pop.kept) for pop in popped] == [(urgent, "s", set()), (batch, "t", {"s"})]


async def test_an_earmark_ends_with_its_entry_in_any_way(under_test: QueueUnderTest) -> None:
    ends = ["removed", "expired", "popped elsewhere", "replaced by a charged attempt"]
    for number, end in enumerate(ends):
        deadline_at = under_test.clock() + timedelta(seconds=3)
        head = await skipped_head(under_test, deadline_at=deadline_at, arrived_ms=number)
        small = small_entry(arrived_ms=number)
        await under_test.add(small)
        assert await under_test.pop(room_of(50, session="s", capacity=100)) == []
        match end:
            case "removed":
                await under_test.queue.remove_many([(MODEL, head.generation_id)])
            case "expired":
                under_test.advance(1)
            case "popped elsewhere":
                popped = await under_test.pop(room_of(100, session="other"))
                assert {pop.entry for pop in popped} == {head, small}
                await under_test.queue.return_many([pop for pop in popped if pop.entry == small])
            case _:
                newer = replace(head, attempt=1, ready_at=ARRIVAL + timedelta(hours=1))
                await under_test.add(newer)
        assert await under_test.pop_entries(room_of(50, session="s", capacity=100)) == [small], end


async def test_an_earmark_is_a_lease_that_pops_naming_the_session_renew(under_test: QueueUnderTest) -> None:
    await skipped_head(under_test)
    small = small_entry()
    await under_test.add(small)
    for _ in range(3):
        under_test.advance(4.9)
        assert await under_test.pop(room_of(50, session="s", capacity=100)) == []
    under_test.advance(5)
    # Another session may be kept now, one too small for it takes what it can.
    assert await under_test.pop_entries(room_of(50, session="tiny", capacity=60)) == [small]
    assert await under_test.pop(room_of(50, session="t", capacity=95)) == []
    other = small_entry(arrived_ms=1)
    await under_test.add(other)
    assert await under_test.pop(room_of(50, session="t", capacity=95)) == []
    assert await under_test.pop_entries(room_of(50, session="s", capacity=100)) == [other]


async def test_a_session_is_kept_for_one_entry_and_an_entry_keeps_one_session(under_test: QueueUnderTest) -> None:
    first, second = (entry_of("head", arrived_ms=ms, max_tokens=90) for ms in (0, 1))
    await under_test.add(first, second)
    rooms = [room_of(tokens, session=name, capacity=100) for tokens, name in ((30, "s"), (40, "t"), (20, "u"))]
    await under_test.pop(*rooms)
    under_test.advance(2)
    await under_test.pop(*rooms)
    small = small_entry()
    await under_test.add(small)
    popped = await under_test.pop(*rooms)
    assert [(pop.entry, pop.session_id, pop.kept) for pop in popped] == [(small, "u", {"s", "t"})]
    # The first was skipped first: it has the session with most tokens left.
    (pop,) = await under_test.pop(*(replace(room, max_tokens=(100,) * 3) for room in rooms[1:2]))
    assert (pop.entry, pop.session_id) == (first, "t")


async def test_a_closed_session_skips_nobody(under_test: QueueUnderTest) -> None:
    await under_test.add(entry_of("head", max_tokens=90))
    for _ in range(3):
        assert await under_test.pop(room_of(50, entries=0, session="s", capacity=100)) == []
        under_test.advance(1)
    small = small_entry()
    await under_test.add(small)
    assert await under_test.pop_entries(room_of(50, session="s", capacity=100)) == [small]


async def test_an_entry_that_was_popped_in_between_is_skipped_anew(under_test: QueueUnderTest) -> None:
    head = entry_of("head", max_tokens=90)
    await under_test.add(head)
    assert await under_test.pop(room_of(50, session="s", capacity=100)) == []
    under_test.advance(1.5)
    await under_test.queue.return_many(await under_test.pop())
    small = small_entry()
    await under_test.add(small)
    under_test.advance(1)
    assert await under_test.pop_entries(room_of(50, session="s", capacity=100)) == [small]


async def test_models_have_their_own_earmarks(under_test: QueueUnderTest) -> None:
    await skipped_head(under_test)
    theirs = small_entry(model_key=OTHER_MODEL)
    await under_test.add(theirs)
    assert await under_test.pop_entries(room_of(50, session="s"), model_key=OTHER_MODEL) == [theirs]


# -- charged entries


async def test_charged_entries_beyond_their_number_are_overtaken_and_keep_their_place(
    under_test: QueueUnderTest,
) -> None:
    charged = [entry_of(arrived_ms=number, is_charged=True) for number in range(70)]
    fresh = [entry_of(arrived_ms=100), entry_of(arrived_ms=101, priority_class=BATCH)]
    await under_test.add(*charged, *fresh)
    assert await under_test.pop_entries(room_of(max_charged=0)) == fresh
    assert await under_test.pop_entries(room_of()) == charged[:1]
    await under_test.add(late := entry_of(arrived_ms=200))
    assert await under_test.pop_entries(room_of(max_charged=2)) == [*charged[1:3], late]
    assert await under_test.num_queued() == 67


async def test_each_session_takes_its_own_number_of_charged_entries(under_test: QueueUnderTest) -> None:
    charged = [entry_of(arrived_ms=number, is_charged=True) for number in range(3)]
    await under_test.add(*charged)
    popped = await under_test.pop(room_of(100, session="a"), room_of(90, session="b"), room_of(80, max_charged=0))
    assert [(pop.entry, pop.session_id) for pop in popped] == [(charged[0], "a"), (charged[1], "b")]


@pytest.mark.parametrize("max_charged", [0, 1])
async def test_passing_a_charged_entry_over_for_its_charge_is_no_skip(
    under_test: QueueUnderTest, max_charged: int
) -> None:
    await under_test.add(entry_of("head", max_tokens=90, is_charged=True))
    room = room_of(50, session="s", capacity=100, max_charged=max_charged)
    await under_test.pop(room)
    under_test.advance(2)
    await under_test.pop(room)
    small = small_entry()
    await under_test.add(small)
    kept = [] if max_charged else [small]
    assert await under_test.pop_entries(room) == kept
