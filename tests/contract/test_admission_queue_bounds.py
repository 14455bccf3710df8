"""Bounds: who has a place, who is told to come back, and when."""

from datetime import timedelta

import pytest

from scheduler.queue.errors import QueueNotReadyError
from scheduler.queue.port import BoundCheck, BoundStatus
from service_kit.errors import QueueBound
from service_kit.ids import TenantId
from state_store.model import ModelKey, PriorityClass
from tests.support.admission_queues import ARRIVAL, MODEL, OTHER_MODEL, QueueUnderTest, entry_of

FREE, TENANT_FULL, QUEUE_FULL = BoundStatus


def check_of(
    tenant: str = "a",
    prompt_tokens: int = 1,
    priority_class: PriorityClass = PriorityClass.STANDARD,
    model_key: ModelKey = MODEL,
) -> BoundCheck:
    return BoundCheck(
        model_key=model_key, tenant_id=TenantId(tenant), priority_class=priority_class, prompt_tokens=prompt_tokens
    )


async def statuses(under_test: QueueUnderTest, *checks: BoundCheck) -> list[BoundStatus]:
    return [verdict.status for verdict in await under_test.queue.check_many(checks)]


async def test_items_of_one_check_count_for_those_behind_them_and_change_nothing(under_test: QueueUnderTest) -> None:
    checks = [check_of("a"), check_of("b"), check_of("c"), check_of("d"), check_of("d", model_key=OTHER_MODEL)]
    for _ in range(2):
        assert await statuses(under_test, *checks) == [FREE, FREE, FREE, QUEUE_FULL, FREE]
    assert await under_test.num_queued() == 0


async def test_the_bound_of_a_class_counts_its_queued_and_delayed_entries(under_test: QueueUnderTest) -> None:
    entries = [entry_of("abc"[number], arrived_ms=number) for number in range(2)]
    delayed = entry_of("c", ready_at=ARRIVAL + timedelta(seconds=9))
    await under_test.add(*entries, delayed)
    lower = check_of("d", priority_class=PriorityClass.BATCH)
    assert await statuses(under_test, check_of("d"), lower) == [QUEUE_FULL, FREE]
    popped = await under_test.pop(max_entries=1)
    assert await statuses(under_test, check_of("d")) == [FREE]
    await under_test.queue.return_many(popped)
    assert await statuses(under_test, check_of("d")) == [QUEUE_FULL]
    await under_test.queue.remove_many([(MODEL, delayed.generation_id)])
    assert await statuses(under_test, check_of("d")) == [FREE]


async def test_a_tenants_own_bound_is_over_all_classes_of_a_model(under_test: QueueUnderTest) -> None:
    await under_test.add(*(entry_of("a", priority_class=each) for each in PriorityClass))
    assert await statuses(under_test, check_of("a")) == [FREE]
    await under_test.add(entry_of("a"))
    assert await statuses(under_test, check_of("a"), check_of("a", model_key=OTHER_MODEL)) == [TENANT_FULL, FREE]
    assert await statuses(under_test, check_of("b")) == [FREE]


async def test_the_tenants_own_bound_is_told_before_everybodys(under_test: QueueUnderTest) -> None:
    await under_test.add(*(entry_of("a", arrived_ms=number) for number in range(4)))
    assert await statuses(under_test, check_of("a"), check_of("b")) == [TENANT_FULL, QUEUE_FULL]


async def test_prompt_tokens_are_bounded_per_class_and_per_tenant(under_test: QueueUnderTest) -> None:
    await under_test.add(entry_of("a", prompt_tokens=60))
    assert await statuses(under_test, check_of("b", 41), check_of("b", 40), check_of("b", 1)) == [
        QUEUE_FULL,
        FREE,
        QUEUE_FULL,
    ]
    await under_test.add(entry_of("a", prompt_tokens=80, priority_class=PriorityClass.BATCH))
    urgent = PriorityClass.INTERACTIVE
    assert await statuses(under_test, check_of("a", 11, urgent), check_of("a", 10, urgent)) == [TENANT_FULL, FREE]


async def test_a_refusal_names_its_bound_and_the_requests_where_both_are_reached(under_test: QueueUnderTest) -> None:
    await under_test.add(entry_of("a", prompt_tokens=60))
    checks = [check_of("b", 41), check_of("b", 40), check_of("c", 0), check_of("d", 0), check_of("d", 99)]
    bounds = [verdict.bound for verdict in await under_test.queue.check_many(checks)]
    assert bounds == [QueueBound.PROMPT_TOKENS, None, None, QueueBound.REQUESTS, QueueBound.REQUESTS]


async def test_a_verdict_tells_how_many_more_fit_behind_it(under_test: QueueUnderTest) -> None:
    await under_test.add(entry_of("a"), entry_of("a", priority_class=PriorityClass.BATCH))
    checks = [check_of("a"), check_of("b"), check_of("b"), check_of("a", model_key=OTHER_MODEL)]
    verdicts = await under_test.queue.check_many(checks)
    assert [(each.places.queue, each.places.tenant) for each in verdicts] == [(1, 1), (0, 3), (0, 3), (2, 3)]


async def test_who_takes_a_last_place_tells_when_there_is_another(under_test: QueueUnderTest) -> None:
    under_test.clock.advance(timedelta(microseconds=-123456))  # to the beginning of a window of 5 s
    await under_test.add(*(entry_of("ab"[number % 2], arrived_ms=number) for number in range(6)))
    await under_test.queue.ack_many(await under_test.pop(max_entries=4))
    under_test.advance(5)
    (verdict,) = await under_test.queue.check_many([check_of("c")])
    assert (verdict.status, verdict.places.queue) == (FREE, 0)
    assert verdict.retry_after.total_seconds() == 0.5


async def test_a_bound_in_tokens_never_refuses_what_is_alone(under_test: QueueUnderTest) -> None:
    assert await statuses(under_test, check_of("a", 5000), check_of("b")) == [FREE, QUEUE_FULL]


async def test_expired_entries_free_their_place_at_the_check(under_test: QueueUnderTest) -> None:
    await under_test.add(*(entry_of("a", deadline_at=ARRIVAL + timedelta(seconds=1)) for _ in range(3)))
    assert await statuses(under_test, check_of("b")) == [QUEUE_FULL]
    under_test.advance(1)
    assert await statuses(under_test, check_of("b")) == [FREE]


async def wait_of(under_test: QueueUnderTest, check: BoundCheck) -> float:
    (verdict,) = await under_test.queue.check_many([check])
    return verdict.retry_after.total_seconds()


async def test_who_is_refused_is_told_to_wait_by_the_measured_pop_rate(under_test: QueueUnderTest) -> None:
    under_test.clock.advance(timedelta(microseconds=-123456))  # to the beginning of a window of 5 s
    await under_test.add(*(entry_of("ab"[number % 2], arrived_ms=number) for number in range(8)))
    assert await wait_of(under_test, check_of("c")) == 30  # nothing was ever popped
    await under_test.queue.ack_many(await under_test.pop(max_entries=4))
    under_test.advance(5)
    # 4 in 5 s; of 4 queued requests 2 have to go before a fourth has its place
    assert await wait_of(under_test, check_of("c")) == pytest.approx(2 * 5 / 4)
    under_test.advance(3)
    assert await wait_of(under_test, check_of("c")) == pytest.approx(2 * 8 / 4)
    under_test.advance(7)
    assert await wait_of(under_test, check_of("c")) == 30


async def test_the_wait_is_at_least_half_a_second_and_longer_for_a_tenant_that_shares(
    under_test: QueueUnderTest,
) -> None:
    await under_test.add(*(entry_of("x", arrived_ms=number) for number in range(100)))
    await under_test.queue.ack_many(await under_test.pop())
    under_test.advance(5)
    await under_test.add(*(entry_of("a", arrived_ms=number) for number in range(4)), *(entry_of(each) for each in "bc"))
    everybody = await wait_of(under_test, check_of("d"))
    assert everybody == 0.5
    assert await wait_of(under_test, check_of("a")) == 0.5
    await under_test.add(*(entry_of("a", arrived_ms=number) for number in range(40)))
    assert await wait_of(under_test, check_of("a")) > 3 * 0.5


async def test_a_check_is_refused_while_the_queue_is_not_ready(emptied: QueueUnderTest) -> None:
    with pytest.raises(QueueNotReadyError):
        await emptied.queue.check_many([check_of()])
