"""Who is charged when an engine dies, and with whom a charged generation travels; over memory twins and real servers."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest_asyncio

from scheduler.policy import back_off
from service_kit.delta import Cursor, make_delta
from state_store.model import AttemptOutcome, State
from tests.support.polling import eventually, eventually_answers
from tests.support.scheduler_rig import SchedulerRig
from tests.support.scripted_worker import ScriptedWorker

MakeWorker = Callable[[], Awaitable[ScriptedWorker]]


@pytest_asyncio.fixture
async def new_worker(rig: SchedulerRig) -> AsyncIterator[MakeWorker]:
    """Makes workers that are announced and have room."""
    workers: list[ScriptedWorker] = []

    async def make() -> ScriptedWorker:
        num_ready = len(rig.parts.registry.ready())
        worker = ScriptedWorker()
        await worker.start()
        workers.append(worker)
        await worker.announce(rig.address)
        await eventually(lambda: len(rig.parts.registry.ready()) > num_ready)
        return worker

    yield make
    for worker in workers:
        await worker.stop()


async def submitted(rig: SchedulerRig, number: int) -> list[str]:
    return [(await rig.submit()).generation_id for _ in range(number)]


async def dispatched(rig: SchedulerRig, worker: ScriptedWorker, number: int) -> list[str]:
    """Dispatches once; the generations that the worker has then got, of all its life `number`."""
    await rig.dispatch()
    await worker.until(lambda: len(worker.assignments()) == number)
    return [each.generation_id for each in worker.assignments()]


async def charges(rig: SchedulerRig, generation_ids: Sequence[str]) -> list[int]:
    return [(await rig.record(generation_id)).charged_attempts for generation_id in generation_ids]


async def queued_again(rig: SchedulerRig, generation_ids: Sequence[str]) -> None:
    async def are_queued() -> bool:
        records = [await rig.record(generation_id) for generation_id in generation_ids]
        entries = [(record.model_key, record.generation_id, record.attempt) for record in records]
        return all(await rig.stores.queue.contains_many(entries)) and all(r.state is State.QUEUED for r in records)

    await eventually_answers(are_queued)


def add_token(worker: ScriptedWorker, generation_id: str, attempt: int = 1, after: Cursor | None = None) -> Cursor:
    delta = make_delta(after=after or Cursor(), token_ids=[7], texts=["x"])
    worker.say(generation_id, attempt, delta)
    return delta.end


async def test_a_crash_charges_only_what_its_step_ran_first(rig: SchedulerRig, new_worker: MakeWorker) -> None:
    worker = await new_worker()
    ids = await submitted(rig, 4)
    assert await dispatched(rig, worker, 4) == ids
    add_token(worker, ids[0])
    await worker.until(lambda: bool(worker.received_of("ack")))
    worker.lose_engine(untried=[(ids[1], 1)])
    await queued_again(rig, ids)
    assert await charges(rig, ids) == [0, 1, 0, 0]
    ends = [(await rig.stores.store.attempts_of((await rig.record(each)).generation_id))[0] for each in ids]
    assert [(end.outcome, end.is_charged) for end in ends] == [
        (AttemptOutcome.SESSION_LOST, is_charged) for is_charged in (False, True, False, False)
    ]


async def test_a_death_that_nobody_explains_charges_whatever_added_nothing(
    rig: SchedulerRig, new_worker: MakeWorker
) -> None:
    worker = await new_worker()
    ids = await submitted(rig, 3)
    await dispatched(rig, worker, 3)
    add_token(worker, ids[0])
    await worker.until(lambda: bool(worker.received_of("ack")))
    worker.lose_engine(untried=None)
    await queued_again(rig, ids)
    assert await charges(rig, ids) == [0, 1, 1]


async def test_charged_generations_travel_alone_until_a_token_clears_them_and_others_overtake(
    rig: SchedulerRig, new_worker: MakeWorker
) -> None:
    worker = await new_worker()
    ids = await submitted(rig, 3)
    await dispatched(rig, worker, 3)
    worker.lose_engine(untried=None)
    await queued_again(rig, ids)
    fresh = await submitted(rig, 2)
    rig.clock.advance(back_off(1).total_seconds())
    second = await new_worker()
    assert await dispatched(rig, second, 3) == [ids[0], *fresh]
    assert not await rig.dispatch(), "the charged one aboard has not added a token yet"
    add_token(second, ids[0], attempt=2)
    await second.until(lambda: bool(second.received_of("ack")))
    assert await dispatched(rig, second, 4) == [ids[0], *fresh, ids[1]]
    second.lose_engine(untried=None)
    await queued_again(rig, [*ids, *fresh])
    assert await charges(rig, [*ids, *fresh]) == [1, 2, 1, 0, 0], "the charged one that had added nothing did it"


async def test_what_was_charged_comes_back_after_a_while_to_its_old_place_and_the_others_at_once(
    rig: SchedulerRig, new_worker: MakeWorker
) -> None:
    worker = await new_worker()
    ids = await submitted(rig, 3)
    await dispatched(rig, worker, 3)
    worker.lose_engine(untried=[(ids[1], 1)])
    await queued_again(rig, ids)
    second = await new_worker()
    assert await dispatched(rig, second, 2) == [ids[0], ids[2]]
    late = await submitted(rig, 1)
    rig.clock.advance(back_off(1).total_seconds() - 0.001)
    assert await dispatched(rig, second, 3) == [ids[0], ids[2], *late]
    later = await submitted(rig, 1)
    rig.clock.advance(0.001)
    assert await dispatched(rig, second, 5) == [ids[0], ids[2], *late, ids[1], *later]


async def test_a_poisonous_generation_ends_after_three_charges_with_one_dead_letter(
    rig: SchedulerRig, new_worker: MakeWorker
) -> None:
    poison, *neighbours = await submitted(rig, 4)
    for attempt in (1, 2, 3):
        worker = await new_worker()
        assert await dispatched(rig, worker, 4) == [poison, *neighbours]
        # In the first round the poison runs alone first, later all begin in the same step.
        in_step = [poison] if attempt == 1 else [poison, *neighbours]
        worker.lose_engine(untried=[(each, attempt) for each in in_step])
        await queued_again(rig, neighbours if attempt == 3 else [poison, *neighbours])
        rig.clock.advance(back_off(attempt).total_seconds())

    async def has_ended() -> bool:
        return (await rig.record(poison)).state.is_terminal

    await eventually_answers(has_ended)
    ended = await rig.record(poison)
    assert (ended.state, ended.error_reason, ended.attempt) == (State.FAILED, "ATTEMPTS_EXHAUSTED", 3)
    assert await charges(rig, [poison, *neighbours]) == [3, 0, 0, 0]
    (letter,) = await rig.stores.store.dead_letters(limit=10)
    assert (letter.generation_id, letter.reason, letter.attempts) == (poison, "ATTEMPTS_EXHAUSTED", 3)
    assert letter.worker_ids == ("scripted",) * 3
