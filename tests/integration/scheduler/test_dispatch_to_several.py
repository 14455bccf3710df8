"""Several sessions of one model under one scheduler: one pop for all of them, and a route for each entry."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from scheduler.dispatcher import MAX_POP
from scheduler.queue.port import SessionRoom
from scheduler.routing import prompt_digests
from service_kit.ids import GenerationId, SessionId, TenantId
from service_kit.prefix_hash import model_fingerprint
from state_store.model import GenerationRecord, PriorityClass, State
from state_store.ports import GrantRequest, GrantResult
from tests.support.polling import eventually
from tests.support.scheduler_rig import MODEL_KEY, TENANT, SchedulerRig, make_generation
from tests.support.scripted_worker import ScriptedWorker

Pair = tuple[ScriptedWorker, ScriptedWorker]


def digests_of(prompt: Sequence[int]) -> tuple[int, ...]:
    """As the workers announce them."""
    fingerprint = model_fingerprint(revision=MODEL_KEY.revision, precision=MODEL_KEY.precision)
    return prompt_digests(prompt, fingerprint=fingerprint, tenant_salt=TENANT, block_sizes={16})[16]


@pytest_asyncio.fixture
async def pair(rig: SchedulerRig) -> AsyncIterator[Pair]:
    """Two workers with room, of which the second has the prompt of 320 zeros cached."""
    async with AsyncExitStack() as stack:
        workers = ScriptedWorker(), ScriptedWorker()
        workers[1].cached_prefixes = list(digests_of([0] * 320))
        for worker in workers:
            await worker.start()
            stack.push_async_callback(worker.stop)
            await worker.announce(rig.address)
        await eventually(lambda: len(rig.parts.registry.ready()) == 2)
        yield workers


async def submit_many(rig: SchedulerRig, number: int, **changes: object) -> list[GenerationId]:
    return [(await rig.submit(make_generation(**changes))).generation_id for _ in range(number)]  # type: ignore[arg-type]


def given(worker: ScriptedWorker) -> list[str]:
    return [each.generation_id for each in worker.assignments()]


async def has_all(pair: Pair, number: int) -> None:
    await eventually(lambda: len(given(pair[0])) + len(given(pair[1])) == number)


async def test_sessions_of_a_model_share_what_is_queued_in_one_pop(
    rig: SchedulerRig, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pops: list[int] = []
    pop = rig.stores.queue.pop

    async def counted(*args: object, **changes: object) -> object:
        pops.append(1)
        return await pop(*args, **changes)  # type: ignore[arg-type]

    monkeypatch.setattr(rig.stores.queue, "pop", counted)
    ids = await submit_many(rig, 8)
    assert await rig.dispatch()
    await has_all(pair, 8)
    assert len(pops) == 1
    assert sorted(given(pair[0]) + given(pair[1])) == sorted(ids)
    assert len(given(pair[0])) == len(given(pair[1])) == 4


async def test_no_session_gets_more_than_its_part_of_one_pop(rig: SchedulerRig, pair: Pair) -> None:
    await submit_many(rig, 2 * MAX_POP + 4)
    assert await rig.dispatch()
    await has_all(pair, 2 * MAX_POP)
    assert len(given(pair[0])) == len(given(pair[1])) == MAX_POP


async def test_a_prompt_goes_where_it_is_cached_and_the_next_of_its_kind_too(rig: SchedulerRig, pair: Pair) -> None:
    cached = await submit_many(rig, 1, prompt_token_ids=(0,) * 320 + (7,))
    assert await rig.dispatch()
    stranger = await submit_many(rig, 1, prompt_token_ids=(3,) * 400)
    assert await rig.dispatch()
    await has_all(pair, 2)
    assert (given(pair[0]), given(pair[1])) == (stranger, cached)
    again = await submit_many(rig, 1, prompt_token_ids=(3,) * 400 + (4,))
    assert await rig.dispatch()
    await has_all(pair, 3)
    assert given(pair[0]) == [*stranger, *again], "it was sent there a moment ago, and is not announced"


async def test_another_tenant_does_not_find_the_prefix(rig: SchedulerRig, pair: Pair) -> None:
    other = make_generation(prompt_token_ids=(0,) * 320, tenant_id=TenantId("tenant-b"))
    assert set(digests_of(other.prompt_token_ids)) == set(pair[1].cached_prefixes)
    busy = next(s for s in rig.parts.registry.ready() if s.session.session_id == pair[1].session_id)
    busy.recent_work.add(10, now_s=0.0)
    await rig.submit(other)
    assert await rig.dispatch()
    await has_all(pair, 1)
    assert given(pair[0]) == [other.generation_id]


async def test_a_session_that_is_fenced_off_gets_nothing_more_and_the_other_serves_what_came_back(
    rig: SchedulerRig, pair: Pair
) -> None:
    lost = await rig.stores.store.lose_session(pair[1].session_id, 1)
    assert lost is not None
    ids = await submit_many(rig, 4, prompt_token_ids=(0,) * 320)
    while await rig.dispatch():
        pass
    await rig.dispatch()
    await has_all(pair, 4)
    assert sorted(given(pair[0])) == sorted(ids)
    records = [await rig.record(each) for each in ids]
    assert {(record.state, record.attempt) for record in records} == {(State.RUNNING, 1)}


async def test_what_was_cancelled_between_pop_and_grant_is_forgotten_and_its_prompt_not_charged(
    rig: SchedulerRig, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled, other = await submit_many(rig, 2)
    grant_many = rig.stores.store.grant_many

    async def cancelled_before(items: Sequence[GrantRequest]) -> list[GrantResult]:
        await rig.parts.cancellation.cancel(TENANT, cancelled)
        return await grant_many(items)

    monkeypatch.setattr(rig.stores.store, "grant_many", cancelled_before)
    assert await rig.dispatch()
    await has_all(pair, 1)
    assert given(pair[0]) + given(pair[1]) == [other]
    depth = await rig.stores.queue.depth(MODEL_KEY)
    assert (depth.num_queued, depth.in_flight) == (0, 0)


async def test_a_worker_full_of_a_lower_class_still_gets_what_is_urgent(rig: SchedulerRig, pair: Pair) -> None:
    await submit_many(rig, 80, priority_class=PriorityClass.BATCH)
    while await rig.dispatch():
        pass
    await has_all(pair, 2 * 18)
    urgent = await submit_many(rig, 3, priority_class=PriorityClass.INTERACTIVE)
    assert await rig.dispatch()
    await has_all(pair, 2 * 18 + 3)
    assert set(urgent) <= {*given(pair[0]), *given(pair[1])}


async def test_in_flight_entries_of_a_model_whose_sessions_are_all_gone_come_back(rig: SchedulerRig) -> None:
    record: GenerationRecord = await rig.submit()
    room = SessionRoom(
        session_id=SessionId("gone"), max_entries=(9, 9, 9), max_tokens=(999, 999, 999), capacity_tokens=999
    )
    assert len(await rig.stores.queue.pop(MODEL_KEY, [room], max_entries=1)) == 1
    rig.clock.advance(4.1)
    await rig.parts.reaper.return_in_flight()
    (popped,) = await rig.stores.queue.pop(MODEL_KEY, [room], max_entries=1)
    assert popped.entry.generation_id == record.generation_id
