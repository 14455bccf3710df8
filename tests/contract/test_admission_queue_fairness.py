"""Whose turn it is: virtual token counters, their charges, refunds, lifting and forgetting."""

from datetime import timedelta

import pytest

from scheduler.queue.port import OutputCharge, Popped
from service_kit.ids import TenantId
from state_store.model import PriorityClass
from tests.support.admission_queues import ARRIVAL, MODEL, OTHER_MODEL, QueueUnderTest, entry_of, room_of


def tenants(popped: list[Popped]) -> str:
    return "".join(pop.entry.tenant_id for pop in popped)


async def charge(under_test: QueueUnderTest, tenant: str, tokens: int, weight: float = 1.0) -> None:
    await under_test.queue.charge_many(
        [OutputCharge(model_key=MODEL, tenant_id=TenantId(tenant), weight=weight, tokens=tokens)]
    )


async def order(under_test: QueueUnderTest, count: int = 100) -> str:
    """The tenants that the next pop takes, in order; nothing stays popped and all charges are refunded."""
    popped = await under_test.pop(max_entries=count)
    await under_test.queue.return_many(popped)
    return tenants(popped)


async def test_tenants_take_turns_by_tokens_and_not_by_requests(under_test: QueueUnderTest) -> None:
    large = [entry_of("a", arrived_ms=ms, prompt_tokens=30) for ms in range(3)]
    small = [entry_of("b", arrived_ms=100 + ms, prompt_tokens=10) for ms in range(6)]
    await under_test.add(*large, *small)
    # a:30; b:10,20,30; then ties go by name
    assert await order(under_test) == "abbbabbba"


async def test_ties_between_tenants_go_by_name_and_not_by_arrival(under_test: QueueUnderTest) -> None:
    await under_test.add(entry_of("b"), entry_of("a", arrived_ms=5), entry_of("é", arrived_ms=-5), entry_of("Z"))
    assert await order(under_test) == "éZab"


async def test_a_weight_divides_what_a_tenant_is_charged(under_test: QueueUnderTest) -> None:
    heavy = [entry_of("a", arrived_ms=ms, weight=3.0, prompt_tokens=10) for ms in range(7)]
    light = [entry_of("b", arrived_ms=ms, prompt_tokens=10) for ms in range(3)]
    await under_test.add(*heavy, *light)
    # 10/3 rounded to millionths is a little less than a third: three of them stay behind one whole.
    assert await order(under_test) == "abaaabaaab"


async def test_output_is_charged_by_weight_in_every_class_the_tenant_waits_in(under_test: QueueUnderTest) -> None:
    entries = [
        entry_of(tenant, priority_class=priority_class, is_charged=is_charged)
        for tenant in "ab"
        for priority_class in PriorityClass
        for is_charged in (False, True)
    ]
    await under_test.add(*entries)
    await charge(under_test, "a", 300, weight=3.0)
    await charge(under_test, "b", 99)
    # a has 100, b 99; each entry costs 7, more than what lies between the two.
    popped = await under_test.pop(room_of(max_charged=9))
    assert tenants(popped) == "babababababa"
    await under_test.queue.return_many(popped)
    await charge(under_test, "b", 1000)
    assert tenants(await under_test.pop(room_of(max_charged=9))) == "aabbaabbaabb"


async def test_only_the_first_attempt_is_charged_for_its_prompt(under_test: QueueUnderTest) -> None:
    again = [entry_of("b", attempt=1, arrived_ms=ms, prompt_tokens=50) for ms in range(2)]
    fresh = [entry_of("a", arrived_ms=ms, prompt_tokens=1) for ms in range(2)]
    await under_test.add(*again, *fresh)
    assert await order(under_test) == "abba"


@pytest.mark.parametrize("end", ["return_many", "drop_many", "remove_many", "reap_in_flight"])
async def test_a_pop_that_ends_without_a_grant_is_refunded(under_test: QueueUnderTest, end: str) -> None:
    await under_test.add(*(entry_of("a", arrived_ms=ms, prompt_tokens=10) for ms in range(3)))
    await under_test.add(*(entry_of("b", arrived_ms=ms, prompt_tokens=10) for ms in range(3)))
    popped = await under_test.pop(max_entries=1)
    match end:
        case "remove_many":
            await under_test.queue.remove_many([(MODEL, pop.entry.generation_id) for pop in popped])
        case "reap_in_flight":
            under_test.advance(4)
            assert await under_test.queue.reap_in_flight([MODEL]) == 1
        case _:
            await getattr(under_test.queue, end)(popped)
    assert await order(under_test, 4) == "abab"


async def test_a_grant_keeps_its_charge_also_when_the_generation_comes_back(under_test: QueueUnderTest) -> None:
    first, *more = (entry_of("a", arrived_ms=ms, prompt_tokens=10) for ms in range(3))
    await under_test.add(first, *more, *(entry_of("b", arrived_ms=ms, prompt_tokens=10) for ms in range(2)))
    await under_test.queue.ack_many(await under_test.pop(max_entries=1))
    assert await order(under_test, 2) == "ba"
    (unacknowledged,) = await under_test.pop(max_entries=1)
    await under_test.add(entry_of("b", attempt=1, generation_id=unacknowledged.entry.generation_id))
    await under_test.queue.return_many([unacknowledged])
    assert await order(under_test, 2) == "ab"


async def test_a_tenant_that_comes_back_is_lifted_to_the_smallest_that_waits(under_test: QueueUnderTest) -> None:
    await under_test.add(*(entry_of(tenant, arrived_ms=ms, prompt_tokens=10) for tenant in "ab" for ms in range(20)))
    await under_test.queue.ack_many(await under_test.pop(max_entries=20))
    await under_test.add(*(entry_of("c", arrived_ms=ms, prompt_tokens=10) for ms in range(5)))
    assert await order(under_test, 9) == "abcabcabc"


async def test_a_tenant_that_waits_already_is_not_lifted(under_test: QueueUnderTest) -> None:
    await under_test.add(entry_of("a"), entry_of("b", arrived_ms=1))
    await charge(under_test, "a", 100)
    await charge(under_test, "b", 50)
    await under_test.add(*(entry_of("b", arrived_ms=ms, prompt_tokens=49) for ms in (2, 3)))
    await charge(under_test, "a", 1)
    assert await order(under_test, 3) == "bba"


async def test_when_none_waits_a_newcomer_starts_where_the_last_one_was_before_its_pop(
    under_test: QueueUnderTest,
) -> None:
    await under_test.add(*(entry_of("b", arrived_ms=ms, prompt_tokens=10) for ms in range(3)))
    await under_test.queue.ack_many(await under_test.pop())
    # b has 30 and had 20 before its last pop.
    await under_test.add(*(entry_of("c", arrived_ms=ms, prompt_tokens=9) for ms in range(3)))
    await under_test.add(*(entry_of("b", arrived_ms=ms, prompt_tokens=9) for ms in range(3)))
    assert await order(under_test) == "ccbcbb"


async def test_a_debt_outlives_idleness_and_credit_does_not(under_test: QueueUnderTest) -> None:
    await under_test.add(entry_of("a", prompt_tokens=10))
    await under_test.queue.ack_many(await under_test.pop())
    await charge(under_test, "a", 90)
    await charge(under_test, "idle", 50)
    await under_test.add(*(entry_of("b", arrived_ms=ms, prompt_tokens=30) for ms in range(5)))
    await under_test.add(*(entry_of("a", arrived_ms=ms, prompt_tokens=30) for ms in range(2)))
    await under_test.add(entry_of("idle", prompt_tokens=30))
    # b starts at the floor of 0, a owes 100, idle 50: b 30, 60; idle 80; b 90, 120; a 130, ...
    assert await order(under_test) == "bbibbaba".replace("i", "idle")


async def test_output_of_a_tenant_without_entries_counts_when_it_comes_back(under_test: QueueUnderTest) -> None:
    await under_test.add(*(entry_of("b", arrived_ms=ms, prompt_tokens=10) for ms in range(4)))
    await charge(under_test, "a", 25)
    await under_test.add(*(entry_of("a", arrived_ms=ms, prompt_tokens=10) for ms in range(2)))
    assert await order(under_test) == "bbbaba"


async def test_a_counter_above_that_of_a_tenant_that_waits_long_is_not_forgotten(under_test: QueueUnderTest) -> None:
    starving = [
        entry_of("starving", arrived_ms=ms, prompt_tokens=10, priority_class=PriorityClass.BATCH) for ms in range(3)
    ]
    await under_test.add(*starving)
    await charge(under_test, "a", 25)
    await charge(under_test, "b", 1000)
    # b's floor of 1000 is above a's 25, but who comes to wait is lifted to the 0 of the one that waits.
    await under_test.add(entry_of("b", priority_class=PriorityClass.INTERACTIVE))
    await under_test.queue.ack_many(await under_test.pop(max_entries=1))
    await under_test.add(entry_of("a", prompt_tokens=10, priority_class=PriorityClass.BATCH))
    assert await order(under_test) == "starving" * 3 + "a"


async def test_a_delayed_entry_makes_no_tenant_wait(under_test: QueueUnderTest) -> None:
    await under_test.add(entry_of("late", ready_at=ARRIVAL + timedelta(seconds=1)))
    await under_test.add(*(entry_of(tenant, arrived_ms=ms, prompt_tokens=10) for tenant in "ab" for ms in range(10)))
    await under_test.queue.ack_many(await under_test.pop(max_entries=10))
    under_test.advance(1)
    await under_test.add(*(entry_of("late", arrived_ms=ms, prompt_tokens=10) for ms in range(5)))
    assert (await order(under_test, 9)).count("late") == 3


async def test_models_have_their_own_counters(under_test: QueueUnderTest) -> None:
    await under_test.add(*(entry_of(tenant, model_key=key) for tenant in "ab" for key in (MODEL, OTHER_MODEL)))
    await charge(under_test, "a", 5)
    assert tenants(await under_test.pop()) == "ba"
    assert tenants(await under_test.pop(model_key=OTHER_MODEL)) == "ab"
