"""The worker's processes with a real scheduler over memory twins: both halves of the session protocol meet."""

import asyncio
import contextlib
import os
import signal
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from gpu_worker.engine.simulated_tokens import expected_output
from scheduler.queue.memory import MemoryAdmissionQueue
from service_kit.model_manifest import read_manifest
from state_store.delta_log.memory import MemoryDeltaLog
from state_store.memory.store import MemoryStore
from state_store.model import ModelKey, State
from tests.chaos.proxy import Link
from tests.integration.worker.scripted_scheduler import TOKEN
from tests.integration.worker.test_worker_process import engine_pid, worker_process
from tests.support.polling import eventually
from tests.support.scheduler_rig import Stores, make_generation, running_scheduler
from tests.support.tiny_models import encode


def now():
    return datetime.now(tz=UTC)


@pytest.fixture
async def rig():
    stores = Stores(store=MemoryStore(), log=MemoryDeltaLog(now), queue=MemoryAdmissionQueue(now), redis=None)
    async with running_scheduler(stores, internal_token=TOKEN) as running:
        yield running


@contextlib.asynccontextmanager
async def dispatching(rig):
    """The scheduler's dispatcher and repairs, running."""

    async def turn():
        while True:
            await rig.dispatch()
            await rig.parts.registry.compare_once()
            rig.clock.advance(0.02)
            await asyncio.sleep(0.02)

    task = asyncio.create_task(turn())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def generation(model_directory, prompt, *, max_output_tokens=40):
    manifest = read_manifest(model_directory)
    made = make_generation(prompt_token_ids=encode(prompt), max_output_tokens=max_output_tokens)
    return replace(
        made, model=manifest.model, model_key=ModelKey(revision=manifest.revision, precision=manifest.precision)
    )


async def wait_final(rig, generation_id, *, within_s=30.0):
    async with asyncio.timeout(within_s):
        while not (record := await rig.record(generation_id)).state.is_terminal:  # noqa: ASYNC110 - a row has no event
            await asyncio.sleep(0.02)
    output = (await rig.stores.store.read_output_many([generation_id]))[0]
    return record, list(output.token_ids) if output is not None else []


async def log_reaches(rig, generation_id, number):
    async with asyncio.timeout(20):
        while (await rig.stores.log.read_many([(generation_id, 0)]))[0].end.sequence_number < number:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def submit(rig, model_directory, prompt, **kwargs):
    await eventually(lambda: bool(rig.parts.registry.ready()), within_s=30)
    return (await rig.submit(generation(model_directory, prompt, **kwargs))).generation_id


def oracle(prompt, count):
    return expected_output(prompt_token_ids=encode(prompt), prior_output=[], seed=0, nonce=0, count=count)


async def test_many_generations_run_to_their_ends(rig, model_directory):
    async with worker_process(model_directory, [rig.address]), dispatching(rig):
        ids = [await submit(rig, model_directory, f"prompt {index}") for index in range(12)]
        for index, generation_id in enumerate(ids):
            record, output = await wait_final(rig, generation_id)
            assert (record.state, record.attempt) == (State.SUCCEEDED, 1)
            assert output == oracle(f"prompt {index}", 40)


async def test_the_loss_of_the_engine_costs_a_pause_and_not_a_token(rig, model_directory):
    async with (
        worker_process(model_directory, [rig.address], settings={"tokens_per_s": 20}) as worker,
        dispatching(rig),
    ):
        generation_id = await submit(rig, model_directory, "hello")
        await log_reaches(rig, generation_id, 10)
        os.kill(engine_pid(worker.pid), signal.SIGKILL)
        record, output = await wait_final(rig, generation_id)
        assert (record.state, record.attempt) == (State.SUCCEEDED, 2)
        assert output == oracle("hello", 40)


async def test_a_broken_stream_costs_neither_a_token_nor_an_attempt(rig, model_directory):
    async with worker_process(model_directory, [rig.address], settings={"tokens_per_s": 20}), dispatching(rig):
        generation_id = await submit(rig, model_directory, "hello")
        await log_reaches(rig, generation_id, 10)
        for session in rig.parts.registry.ready():
            session._stream._is_overrun.set()
        record, output = await wait_final(rig, generation_id)
        assert (record.state, record.attempt) == (State.SUCCEEDED, 1)
        assert output == oracle("hello", 40)


@contextlib.asynccontextmanager
async def linked(rig, model_directory):
    """A worker that speaks with the scheduler over links only."""
    started = []
    links = Link("worker", lambda: started[0].address), Link("scheduler", lambda: rig.address)
    async with contextlib.AsyncExitStack() as stack:
        for link in links:
            await link.start()
            stack.push_async_callback(link.stop)
        to_worker, to_scheduler = (link.address for link in links)
        worker = worker_process(
            model_directory, [to_scheduler], settings={"tokens_per_s": 40}, SLUICE_WORKER_ADVERTISE=to_worker
        )
        started.append(await stack.enter_async_context(worker))
        await stack.enter_async_context(dispatching(rig))
        yield links


def break_links(links, *, is_cut):
    for link in links:
        link.hold()
        if is_cut:
            link.cut()


@pytest.mark.parametrize("is_cut", [True, False], ids=["connections reset", "nothing passes"])
async def test_a_blip_of_100_ms_between_scheduler_and_worker_requeues_nothing(rig, model_directory, is_cut):
    async with linked(rig, model_directory) as links:
        prompts = [f"blip {number}" for number in range(5)]
        ids = [await submit(rig, model_directory, prompt) for prompt in prompts]
        await log_reaches(rig, ids[-1], 5)
        session_id = (await rig.record(ids[0])).session_id
        break_links(links, is_cut=is_cut)
        await asyncio.sleep(0.1)  # the blip
        for link in links:
            link.release()
        for prompt, generation_id in zip(prompts, ids, strict=True):
            record, output = await wait_final(rig, generation_id)
            assert (record.state, record.attempt, record.charged_attempts) == (State.SUCCEEDED, 1, 0)
            assert output == oracle(prompt, 40)
            (attempt,) = await rig.stores.store.attempts_of(generation_id)
            assert attempt.session_id == session_id


async def test_a_worker_that_was_cut_off_and_comes_back_begins_a_new_session(rig, model_directory):
    async with linked(rig, model_directory) as links:
        generation_id = await submit(rig, model_directory, "cut off")
        await log_reaches(rig, generation_id, 5)
        session_id = (await rig.record(generation_id)).session_id
        break_links(links, is_cut=True)
        async with asyncio.timeout(20):
            while (await rig.record(generation_id)).state is not State.QUEUED:  # noqa: ASYNC110 - a row has no event
                await asyncio.sleep(0.02)
        for link in links:
            link.release()
        record, output = await wait_final(rig, generation_id)
        assert (record.state, record.attempt, record.charged_attempts) == (State.SUCCEEDED, 2, 0)
        assert output == oracle("cut off", 40)
        first, second = await rig.stores.store.attempts_of(generation_id)
        assert first.session_id == session_id != second.session_id


async def test_a_draining_worker_hands_back_what_another_then_finishes(rig, model_directory):
    async with (
        dispatching(rig),
        worker_process(model_directory, [rig.address], settings={"tokens_per_s": 10}, SLUICE_DRAIN_S="0.3") as first,
    ):
        generation_id = await submit(rig, model_directory, "hello")
        await log_reaches(rig, generation_id, 5)
        first.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(first.wait(), 10) == 0
        async with worker_process(model_directory, [rig.address]):
            record, output = await wait_final(rig, generation_id)
            assert (record.state, record.attempt) == (State.SUCCEEDED, 2)
            assert output == oracle("hello", 40)
