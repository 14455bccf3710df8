"""What admission refuses before the commit, and whom it never refuses; over memory twins and real servers."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta

import pytest
import pytest_asyncio

from scheduler.admission import Submitted
from scheduler.model_directory import REMEMBERED_S
from scheduler.queue.memory import MemoryAdmissionQueue
from scheduler.queue.redis_queue import RedisAdmissionQueue
from scheduler.queue.settings import QueueSettings
from service_kit.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    QuotaExceededError,
    Reason,
    UnavailableError,
)
from service_kit.ids import TenantId
from state_store.errors import StoreUnavailableError
from state_store.model import ModelKey, NewGeneration, PriorityClass
from state_store.ports import SubmitKind, SubmitResult
from tests.support.generations import LEASE, new_session
from tests.support.polling import eventually
from tests.support.scheduler_rig import MODEL_KEY, SchedulerRig, Stores, make_generation, running_scheduler

BOUNDS = QueueSettings(max_requests=(3, 3, 3), max_prompt_tokens=(100, 100, 100), max_tenant_requests=2)
OTHER_TENANT = TenantId("tenant-b")


@pytest_asyncio.fixture
async def bounded(stores: Stores) -> AsyncIterator[SchedulerRig]:
    """A scheduler whose queue is soon full, and a worker's session of 10 blocks with a context of 100."""
    if stores.redis is None:
        stores.queue = MemoryAdmissionQueue(stores.clock.now, BOUNDS)
    else:
        stores.queue = RedisAdmissionQueue(stores.redis, BOUNDS, clock=stores.clock.now)
    session = new_session(model_key=MODEL_KEY, num_blocks=10, block_size=16, context_length=100)
    await stores.store.open_session(session, lease=LEASE)
    async with running_scheduler(stores, clock=stores.clock) as rig:
        yield rig


async def submit(rig: SchedulerRig, generation: NewGeneration) -> Submitted:
    return await rig.parts.admission.submit(generation, has_seed=True)


def small(**changes: object) -> NewGeneration:
    return make_generation(**{"max_output_tokens": 10, **changes})  # type: ignore[arg-type]


async def is_committed(rig: SchedulerRig, generation: NewGeneration) -> bool:
    return (await rig.stores.store.get_many([generation.generation_id]))[0] is not None


async def fill_tenant(rig: SchedulerRig) -> NewGeneration:
    first = small()
    for each in (first, small()):
        assert (await submit(rig, each)).kind is SubmitKind.CREATED
    return first


async def test_who_commits_hears_how_many_more_fit_and_who_attaches_does_not(bounded: SchedulerRig) -> None:
    first = small()
    rooms = [(await submit(bounded, each)).room for each in (first, small())]
    assert [room and (room.places.queue, room.places.tenant) for room in rooms] == [(2, 1), (1, 0)]
    assert (await submit(bounded, first)).room is None


async def test_a_tenant_that_has_its_part_of_the_queue_is_refused_and_others_are_not(bounded: SchedulerRig) -> None:
    await fill_tenant(bounded)
    refused = small(priority_class=PriorityClass.INTERACTIVE)
    with pytest.raises(QuotaExceededError) as caught:
        await submit(bounded, refused)
    assert caught.value.reason == Reason.TENANT_QUEUE_FULL
    assert timedelta(seconds=0.5) <= caught.value.retry_after <= timedelta(seconds=30)
    assert not await is_committed(bounded, refused)
    assert (await submit(bounded, small(tenant_id=OTHER_TENANT))).kind is SubmitKind.CREATED


async def test_a_full_queue_refuses_everybody_of_its_class_alone(bounded: SchedulerRig) -> None:
    await fill_tenant(bounded)
    await submit(bounded, small(tenant_id=OTHER_TENANT))
    refused = small(tenant_id=OTHER_TENANT)
    with pytest.raises(UnavailableError) as caught:
        await submit(bounded, refused)
    assert (caught.value.reason, caught.value.metadata) == (Reason.QUEUE_FULL, {"bound": "requests"})
    assert caught.value.retry_after >= timedelta(seconds=0.5)
    assert not await is_committed(bounded, refused)
    urgent = small(tenant_id=OTHER_TENANT, priority_class=PriorityClass.INTERACTIVE)
    assert (await submit(bounded, urgent)).kind is SubmitKind.CREATED


async def test_a_prompt_that_exceeds_the_queues_tokens_is_refused_with_that_bound(bounded: SchedulerRig) -> None:
    await submit(bounded, small(prompt_token_ids=(1,) * 60))
    with pytest.raises(UnavailableError) as caught:
        await submit(bounded, small(prompt_token_ids=(1,) * 60, tenant_id=OTHER_TENANT))
    assert (caught.value.reason, caught.value.metadata) == (Reason.QUEUE_FULL, {"bound": "prompt_tokens"})
    assert (await submit(bounded, small(tenant_id=OTHER_TENANT))).kind is SubmitKind.CREATED


async def test_a_known_request_id_attaches_while_everything_is_full(bounded: SchedulerRig) -> None:
    first = await fill_tenant(bounded)
    again = await submit(bounded, small(request_id=first.request_id))
    assert (again.kind, again.record.generation_id) == (SubmitKind.EXISTING, first.generation_id)
    with pytest.raises(AlreadyExistsError):
        await submit(bounded, small(request_id=first.request_id, request_hash=b"o" * 32))


async def test_a_known_request_id_attaches_when_its_workers_are_gone_or_too_small(bounded: SchedulerRig) -> None:
    first = small()
    await submit(bounded, first)
    large = small(request_id=first.request_id, max_output_tokens=1000)
    assert (await submit(bounded, large)).kind is SubmitKind.EXISTING
    for session in await bounded.stores.store.list_sessions():
        await bounded.stores.store.lose_session(session.session_id, session.owner_epoch)
    bounded.clock.advance(REMEMBERED_S + 1)
    assert (await submit(bounded, small(request_id=first.request_id))).kind is SubmitKind.EXISTING
    with pytest.raises(UnavailableError) as caught:
        await submit(bounded, small())
    assert caught.value.reason == Reason.NO_WORKER


async def test_a_model_without_a_worker_is_unavailable_and_says_when_to_come_back(bounded: SchedulerRig) -> None:
    generation = small()
    other = NewGeneration(
        **{name: getattr(generation, name) for name in generation.__dataclass_fields__}
        | {"model_key": ModelKey(revision="another", precision="fp32")}
    )
    with pytest.raises(UnavailableError) as caught:
        await submit(bounded, other)
    assert caught.value.reason == Reason.NO_WORKER
    assert caught.value.retry_after > timedelta(0)
    assert not await is_committed(bounded, other)


@pytest.mark.parametrize(("prompt", "output", "fits"), [(90, 10, True), (91, 10, False), (3, 97, True), (3, 98, False)])
async def test_what_no_worker_can_hold_is_refused_by_name(
    bounded: SchedulerRig, prompt: int, output: int, fits: bool
) -> None:
    generation = make_generation(prompt_token_ids=(1,) * prompt, max_output_tokens=output)
    if fits:
        assert (await submit(bounded, generation)).kind is SubmitKind.CREATED
        return
    with pytest.raises(InvalidArgumentError, match=r"prompt.*holds 100") as caught:
        await submit(bounded, generation)
    assert caught.value.reason == Reason.PROMPT_TOO_LONG
    assert not await is_committed(bounded, generation)


async def test_what_fits_one_of_several_workers_is_admitted(bounded: SchedulerRig) -> None:
    larger = new_session(model_key=MODEL_KEY, num_blocks=20, block_size=16, context_length=300)
    await bounded.stores.store.open_session(larger, lease=LEASE)
    generation = make_generation(prompt_token_ids=(1,) * 200, max_output_tokens=100)
    assert (await submit(bounded, generation)).kind is SubmitKind.CREATED


async def test_nothing_new_is_committed_while_the_queue_cannot_be_asked_and_what_is_known_attaches(
    stores: Stores,
) -> None:
    await stores.store.open_session(new_session(model_key=MODEL_KEY), lease=LEASE)
    async with running_scheduler(stores, clock=stores.clock) as rig:
        known = small()
        await submit(rig, known)
        await stores.lose_log_and_queue()
        refused = small()
        with pytest.raises(UnavailableError) as caught:
            await submit(rig, refused)
        assert caught.value.reason == Reason.STORE_UNAVAILABLE
        assert not await is_committed(rig, refused)
        assert (await submit(rig, small(request_id=known.request_id))).kind is SubmitKind.EXISTING


async def test_what_is_refused_does_not_wait_for_a_commit_and_a_commit_under_way_has_its_place(
    bounded: SchedulerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill_tenant(bounded)
    store, is_committing, may_commit = bounded.stores.store, asyncio.Event(), asyncio.Event()
    submit_many = store.submit_many

    async def slow(items: Sequence[NewGeneration]) -> list[SubmitResult]:
        is_committing.set()
        await may_commit.wait()
        return await submit_many(items)

    monkeypatch.setattr(store, "submit_many", slow)
    last = asyncio.create_task(submit(bounded, small(tenant_id=OTHER_TENANT)))
    await is_committing.wait()
    with pytest.raises(UnavailableError) as caught:
        await submit(bounded, small(tenant_id=OTHER_TENANT))
    assert caught.value.reason == Reason.QUEUE_FULL
    assert not last.done()
    may_commit.set()
    assert (await last).kind is SubmitKind.CREATED


async def test_a_generation_that_is_handed_in_twice_at_once_is_committed_once(bounded: SchedulerRig) -> None:
    generation = small()
    submitted = await asyncio.gather(*(submit(bounded, generation) for _ in range(2)))
    assert {each.record.generation_id for each in submitted} == {generation.generation_id}
    assert [each.kind for each in submitted].count(SubmitKind.CREATED) == 1


async def test_a_refused_request_that_nobody_can_know_is_not_looked_for(
    bounded: SchedulerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill_tenant(bounded)
    sought: list[NewGeneration] = []

    async def seek(items: Sequence[NewGeneration]) -> list[SubmitResult | None]:
        sought.extend(items)
        return [None for _ in items]

    monkeypatch.setattr(bounded.stores.store, "attach_many", seek)
    new, perhaps_known = small(), small()
    for each in (new, perhaps_known):
        with pytest.raises(QuotaExceededError):
            await bounded.parts.admission.submit(each, has_seed=True, is_new=each is new)
    assert [each.generation_id for each in sought] == [perhaps_known.generation_id]


async def test_a_caller_that_goes_away_before_the_commit_leaves_no_place_taken(
    bounded: SchedulerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, is_committing, may_commit = bounded.stores.store, asyncio.Event(), asyncio.Event()

    async def broken(items: Sequence[NewGeneration]) -> list[SubmitResult]:
        is_committing.set()
        await may_commit.wait()
        raise StoreUnavailableError("gone")

    with monkeypatch.context() as patched:
        patched.setattr(store, "submit_many", broken)
        leaving = [asyncio.create_task(submit(bounded, small())) for _ in range(2)]
        await is_committing.wait()
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        may_commit.set()
        await eventually(lambda: not bounded.parts.admission.num_claims)
    await fill_tenant(bounded)
