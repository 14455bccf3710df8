"""No class keeps another waiting for ever: what goes out of class order is urgent, and what is skipped for long gets a session."""

from dataclasses import replace

from scheduler.queue.port import Popped, QueueEntry, SessionRoom
from scheduler.queue.settings import QueueSettings
from state_store.model import PriorityClass
from tests.support.admission_queues import MODEL, QueueUnderTest, entry_of, room_of

INTERACTIVE, STANDARD, BATCH = PriorityClass
STARVING_S = QueueSettings().starving_after.total_seconds()
ROOM = room_of((50, 20, 20), session="s", capacity=100)
"""Memory that higher classes fill."""


def urgent_entry(number: int = 0) -> QueueEntry:
    return entry_of("small", arrived_ms=number, max_tokens=1, priority_class=INTERACTIVE)


async def pop_urgent(under_test: QueueUnderTest, number: int, *rooms: SessionRoom) -> None:
    """Of INTERACTIVE, one after the other."""
    for _ in range(number):
        await under_test.add(entry := urgent_entry())
        (popped,) = await under_test.pop(*rooms, max_entries=1)
        assert (popped.entry, popped.is_urgent) == (entry, False)
        await under_test.queue.ack_many([popped])


async def starving_head(under_test: QueueUnderTest, **changes: object) -> QueueEntry:
    """A large BATCH entry that INTERACTIVE ones have overtaken at "s" for 30 s. The next pop may go out of class order."""
    head = entry_of("head", max_tokens=90, priority_class=BATCH, **changes)  # type: ignore[arg-type]
    await under_test.add(head)
    assert await under_test.pop(ROOM) == []
    await pop_urgent(under_test, 7, ROOM)
    for _ in range(int(STARVING_S)):
        under_test.advance(1)
        assert await under_test.pop(ROOM) == []
    return head


def facts(popped: list[Popped]) -> list[tuple[QueueEntry, str, bool]]:
    return [(pop.entry, pop.session_id, pop.is_urgent) for pop in popped]


# -- the rule of age


async def test_what_the_rule_of_age_takes_is_urgent_while_a_higher_class_waits(under_test: QueueUnderTest) -> None:
    urgent = [entry_of(arrived_ms=31_000 + ms, priority_class=INTERACTIVE) for ms in range(8)]
    old = [entry_of(arrived_ms=ms, priority_class=BATCH) for ms in range(9)]
    await under_test.add(*urgent, *old)
    under_test.advance(31.1)
    popped = await under_test.pop(max_entries=16)
    assert [pop.is_urgent for pop in popped] == [False] * 7 + [True] + [False] * 8
    assert (popped[7].entry, popped[15].entry) == (old[0], old[7])
    await under_test.queue.return_many(popped[7:8])
    (again,) = await under_test.pop(max_entries=1)
    assert (again.entry, again.is_urgent) == (old[0], False), "popped in its class's turn"


async def test_what_waits_in_the_same_class_makes_nothing_urgent(under_test: QueueUnderTest) -> None:
    await under_test.add(*(entry_of(arrived_ms=ms, priority_class=BATCH) for ms in range(9)))
    under_test.advance(31)
    assert not any(pop.is_urgent for pop in await under_test.pop(max_entries=9))


async def test_what_goes_as_urgent_needs_the_room_of_the_highest_class(under_test: QueueUnderTest) -> None:
    urgent = [entry_of(arrived_ms=31_000 + ms, priority_class=INTERACTIVE, max_tokens=1) for ms in range(9)]
    old = entry_of(priority_class=BATCH, max_tokens=40)
    await under_test.add(*urgent, old)
    under_test.advance(31.1)
    popped = await under_test.pop(room_of((50, 0, 0), entries=(9, 0, 0)), max_entries=9)
    assert [pop.entry for pop in popped] == [*urgent[:7], old, urgent[7]]


async def test_the_earmark_of_a_younger_entry_does_not_hold_up_the_rule_of_age(under_test: QueueUnderTest) -> None:
    await pop_urgent(under_test, 7, ROOM)
    older, younger = (
        entry_of(tenant, arrived_ms=ms, max_tokens=5, priority_class=BATCH) for tenant, ms in (("a", 0), ("b", 9))
    )
    kept_for = entry_of("head", arrived_ms=5, max_tokens=90, priority_class=INTERACTIVE)
    await under_test.add(kept_for)
    await under_test.pop(ROOM)
    under_test.advance(31)
    assert await under_test.pop(ROOM) == []  # kept for it from here on
    await under_test.add(younger)
    assert await under_test.pop(ROOM) == []
    await under_test.add(older)
    assert facts(await under_test.pop(ROOM)) == [(older, "s", True)]


async def test_heads_of_a_class_do_not_use_up_what_another_may_look_past(under_test: QueueUnderTest) -> None:
    heads = [
        entry_of(tenant, arrived_ms=ms, max_tokens=60, priority_class=INTERACTIVE)
        for tenant in "abc"
        for ms in range(5)
    ]
    small = entry_of("a", priority_class=BATCH, max_tokens=5)
    await under_test.add(*heads, small)
    assert await under_test.pop_entries(ROOM) == [small]


# -- starving


async def test_what_is_skipped_for_30_s_closes_a_session_to_every_class_until_it_fits_there(
    under_test: QueueUnderTest,
) -> None:
    head = await starving_head(under_test)
    await under_test.add(urgent := urgent_entry())
    other = room_of(50, session="other", capacity=60)
    assert await under_test.pop(ROOM) == []
    assert await under_test.pop(replace(ROOM, max_tokens=(89, 89, 89))) == []
    popped = await under_test.pop(ROOM, other)
    assert facts(popped) == [(urgent, "other", False)]
    assert popped[0].kept == {"s"}
    assert facts(await under_test.pop(replace(ROOM, max_tokens=(90, 0, 0), max_entries=(1, 0, 0)))) == [
        (head, "s", True)
    ]


async def test_nothing_starves_before_30_s_or_out_of_turn(under_test: QueueUnderTest) -> None:
    head = entry_of("head", max_tokens=90, priority_class=BATCH)
    await under_test.add(head)
    await under_test.pop(ROOM)
    under_test.advance(STARVING_S - 0.1)
    await pop_urgent(under_test, 8, ROOM)
    under_test.advance(1)
    await pop_urgent(under_test, 7, ROOM)
    assert await under_test.pop(ROOM) == []
    await under_test.add(urgent_entry())
    assert await under_test.pop(ROOM) == []


async def test_one_entry_of_a_model_starves_at_a_time_and_the_next_7_are_others(under_test: QueueUnderTest) -> None:
    second = entry_of("other", arrived_ms=-1, max_tokens=80, priority_class=BATCH)
    await under_test.add(second)
    first = await starving_head(under_test, arrived_ms=-2)
    room = room_of((60, 20, 20), session="t", capacity=100)
    await pop_urgent(under_test, 3, ROOM, room)
    empty = replace(ROOM, max_tokens=(100, 100, 100))
    assert facts(await under_test.pop(empty)) == [(first, "s", True)]
    await pop_urgent(under_test, 4, ROOM)
    await under_test.add(urgent_entry())
    assert await under_test.pop(ROOM) == []
    assert facts(await under_test.pop(replace(ROOM, max_tokens=(80, 0, 0)))) == [(second, "s", True)]


async def test_what_starves_takes_the_session_that_is_kept_for_another(under_test: QueueUnderTest) -> None:
    large = entry_of("large", arrived_ms=1, max_tokens=95, priority_class=INTERACTIVE)
    head = await starving_head_behind(under_test, large)
    assert facts(await under_test.pop(replace(ROOM, max_tokens=(90, 0, 0)))) == [(head, "s", True)]
    assert facts(await under_test.pop(replace(ROOM, max_tokens=(95, 0, 0)))) == [(large, "s", False)]


async def starving_head_behind(under_test: QueueUnderTest, large: QueueEntry) -> QueueEntry:
    await under_test.add(large)
    await under_test.pop(ROOM)
    under_test.advance(2)
    await under_test.pop(ROOM)  # kept for the large one
    await pop_urgent(under_test, 7, room_of(10, session="t", capacity=60))
    head = entry_of("head", max_tokens=90, priority_class=BATCH)
    await under_test.add(head)
    for _ in range(61):
        under_test.advance(1)
        assert await under_test.pop(ROOM) == []
    return head


async def test_what_ends_the_earmark_of_a_starving_entry_opens_its_session(under_test: QueueUnderTest) -> None:
    head = await starving_head(under_test)
    await under_test.add(urgent := urgent_entry())
    assert await under_test.pop(ROOM) == []
    await under_test.queue.remove_many([(MODEL, head.generation_id)])
    assert facts(await under_test.pop(ROOM)) == [(urgent, "s", False)]


async def test_the_lease_of_a_starving_entrys_session_runs_out_and_another_is_closed(
    under_test: QueueUnderTest,
) -> None:
    head = await starving_head(under_test)
    under_test.advance(5)
    await under_test.add(urgent := urgent_entry())
    other = replace(ROOM, session_id=room_of(session="t").session_id)
    assert await under_test.pop(other) == []
    assert facts(await under_test.pop(ROOM)) == [(urgent, "s", False)]
    assert facts(await under_test.pop(replace(other, max_tokens=(90, 0, 0)))) == [(head, "t", True)]


async def test_a_starving_entry_that_comes_back_is_an_ordinary_one_with_its_age(under_test: QueueUnderTest) -> None:
    head = await starving_head(under_test)
    empty = replace(ROOM, max_tokens=(100, 100, 100))
    await under_test.queue.return_many(await under_test.pop(empty))
    await under_test.add(urgent := urgent_entry())
    assert facts(await under_test.pop(ROOM)) == [(urgent, "s", False)]
    assert facts(await under_test.pop(empty)) == [(head, "s", False)]
