"""What tenants and classes get of a busy service over simulated time."""

import pytest

from state_store.model import PriorityClass
from tests.support.simulated_service import Backlog, Session, SimulatedService

INTERACTIVE, STANDARD, BATCH = PriorityClass


async def service(*sessions: Session) -> SimulatedService:
    made = SimulatedService(*(sessions or (Session("s", num_slots=8),)))
    await made.queue.mark_ready()
    return made


async def test_ten_times_the_requests_with_four_times_the_output_get_no_more_tokens() -> None:
    busy = await service()
    busy.backlogs = [Backlog("greedy", 100, 40, {"prompt_tokens": 8}), Backlog("modest", 10, 10, {"prompt_tokens": 8})]
    await busy.run(40)
    assert sum(busy.served.values()) > 12_000
    assert busy.served["greedy"] == pytest.approx(busy.served["modest"], rel=0.05)


async def test_weights_of_3_to_1_share_tokens_3_to_1() -> None:
    busy = await service()
    busy.backlogs = [Backlog("gold", 20, 10, {"weight": 3.0}), Backlog("plain", 20, 25)]
    await busy.run(40)
    assert busy.served["gold"] / busy.served["plain"] == pytest.approx(3, rel=0.05)


async def test_a_tenant_that_was_idle_gets_its_share_and_no_burst() -> None:
    busy = await service()
    busy.backlogs = [Backlog("a", 10, 15), Backlog("b", 10, 15), Backlog("idle", 10, 15)]
    await busy.run(2)
    gone = busy.backlogs.pop()
    await busy.run(30)
    for seconds, tolerance in ((4, 0.2), (30, 0.05)):
        before = busy.served.copy()
        busy.backlogs = [*busy.backlogs[:2], gone]
        await busy.run(seconds)
        gained = busy.served - before
        assert gained["idle"] / gained.total() == pytest.approx(1 / 3, rel=tolerance)


async def test_a_light_tenant_starts_at_once_beside_one_with_a_long_queue() -> None:
    busy = await service()
    busy.backlogs = [Backlog("greedy", 200, 20)]
    await busy.run(5)
    waits: list[float] = []
    for _ in range(20):
        entry = await busy.submit("light", 5)
        submitted_s = busy.now_s
        await busy.run(1)
        waits.append(busy.started_at_s[entry.generation_id] - submitted_s)
    assert max(waits) <= 20 * 0.02  # until the next of 8 running requests of 20 steps is through


async def test_lower_classes_get_an_eighth_beside_a_saturating_one_and_all_of_them_finish() -> None:
    busy = await service()
    busy.backlogs = [Backlog("urgent", 30, 5, {"priority_class": INTERACTIVE})]
    batch = [await busy.submit("patient", 5, priority_class=BATCH) for _ in range(40)]
    await busy.run(30)
    assert busy.num_started["patient"] == 0
    before = busy.num_started.copy()
    await busy.run(3)
    started = busy.num_started - before
    assert started["patient"] * 7 == pytest.approx(started["urgent"], rel=0.15)
    await busy.run(5)
    assert busy.num_finished["patient"] == len(batch)


async def test_a_head_that_needs_most_of_a_session_starts_soon_and_the_others_keep_flowing() -> None:
    busy = await service(*(Session(name, num_slots=16, capacity_tokens=160) for name in ("s", "t")))
    busy.backlogs = [Backlog("small", 50, 25, {"max_tokens": 20})]
    await busy.run(3)
    large = await busy.submit("large", 25, max_tokens=150)
    submitted_s = busy.now_s
    started_per_second = []
    for _ in range(4):
        before = busy.num_started["small"]
        await busy.run(1)
        started_per_second.append(busy.num_started["small"] - before)
    assert busy.started_at_s[large.generation_id] - submitted_s <= 3
    assert min(started_per_second) >= max(started_per_second) / 2 - 8
    assert min(started_per_second) > 0
