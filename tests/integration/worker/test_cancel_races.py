"""Cancels at random moments of a generation's life, through a real scheduler and a real worker session whose engine the
test steps. Whatever meets whatever: one end, one charge, and no memory left behind."""

import asyncio
import random
from collections import Counter
from datetime import UTC, datetime

import grpc
import pytest

from gpu_worker.codec import encode_capabilities
from gpu_worker.session import WorkerSession
from inference.internal.v1 import scheduler_pb2, scheduler_pb2_grpc
from scheduler.queue.memory import MemoryAdmissionQueue
from service_kit.errors import AbortedError
from service_kit.ids import new_session_id
from state_store.delta_log.memory import MemoryDeltaLog
from state_store.memory.store import MemoryStore
from state_store.model import CancelCause, State
from tests.integration.worker.session_setup import TIMES
from tests.integration.worker.test_with_the_scheduler import dispatching, generation, oracle
from tests.support.polling import eventually, eventually_answers
from tests.support.scheduler_rig import Stores, running_scheduler

NUM_RACES = 100
NUM_TOKENS = 12
NUM_BLOCKS = 60
NUM_LOSSES = 3
ENGINE = {"num_blocks": NUM_BLOCKS, "block_size": 16, "max_running": 16, "step_tokens": 64}


def now():
    return datetime.now(tz=UTC)


@pytest.fixture
async def rig():
    stores = Stores(store=MemoryStore(), log=MemoryDeltaLog(now), queue=MemoryAdmissionQueue(now), redis=None)
    async with running_scheduler(stores) as running:
        yield running


class Races:
    """Owner of the worker's side, of the moments at which generations are to be cancelled, and of the cancels."""

    def __init__(self, rig, setup, seed):
        self.rig = rig
        self.setup = setup
        self.random = random.Random(seed)
        self.records = {}
        self.moments = {}
        self.cancels = {}
        self.aborted = set()
        self.awaited = set()
        self.at_requeue = []
        abort = setup.engine.abort

        async def noted_abort(sequence_ids):
            self.aborted.update(sequence_ids)
            await abort(sequence_ids)

        setup.engine.abort = noted_abort

    def cancel(self, generation_id):
        if generation_id not in self.cancels:
            cancel = self.rig.parts.cancellation.cancel(self.records[generation_id].tenant_id, generation_id)
            self.cancels[generation_id] = asyncio.create_task(cancel)

    def choose_moment(self, record):
        """Tokens made when the cancel is sent; or one of the moments outside the engine."""
        generation_id = record.generation_id
        self.records[generation_id] = record
        match self.random.choice(["queued", "granted", "prefilling", "decoding", "completing", "being requeued"]):
            case "queued":
                self.cancel(generation_id)
            case "granted":
                self.moments[generation_id] = "granted"
            case "prefilling":
                self.moments[generation_id] = 0
            case "decoding":
                self.moments[generation_id] = self.random.randrange(1, NUM_TOKENS - 1)
            case "completing":
                self.moments[generation_id] = self.random.choice([NUM_TOKENS - 1, "said its last word"])
            case _:
                self.at_requeue.append(generation_id)

    def hook_grants(self, monkeypatch):
        store = self.rig.stores.store
        grant_many = store.grant_many

        async def cancelled_behind_the_commit(items):
            results = await grant_many(items)
            for item in items:
                if self.moments.get(item.generation_id) == "granted":
                    self.cancel(item.generation_id)
            return results

        monkeypatch.setattr(store, "grant_many", cancelled_behind_the_commit)

    async def announce(self):
        async with grpc.aio.insecure_channel(self.rig.address) as channel:
            await scheduler_pb2_grpc.SchedulerServiceStub(channel).AnnounceWorker(
                scheduler_pb2.AnnounceWorkerRequest(
                    address=self.setup.address,
                    session_id=self.setup.session.session_id,
                    worker_id="raced",
                    capabilities=encode_capabilities(self.setup.session.capabilities),
                )
            )

    async def lose_session(self):
        """The session is declared lost while some of its generations are being cancelled; the worker begins a new one."""
        old = self.setup.session
        running = [each for each in self.at_requeue if each not in self.cancels and self.is_in_engine(each)]
        (row,) = [row for row in await self.rig.stores.store.list_sessions() if row.session_id == old.session_id]
        for generation_id in running[::2]:
            self.cancel(generation_id)
        lost = await self.rig.stores.store.lose_session(old.session_id, row.owner_epoch)
        for generation_id in running[1::2]:
            self.cancel(generation_id)
        await self.rig.parts.recovery.recover_session(lost, untried=())
        old.end(AbortedError("the session is over"))
        await self.setup.engine.abort([record.sequence_id for record in old.book if record.end is None])
        self.setup.session = WorkerSession(
            session_id=new_session_id(),
            capabilities=old.capabilities,
            engine=self.setup.engine,
            times=TIMES,
            clock=asyncio.get_running_loop().time,
        )
        self.setup.engine.session = self.setup.session
        await self.announce()

    def is_in_engine(self, generation_id):
        return any(record.ref.generation_id == generation_id and not record.end for record in self.setup.session.book)

    async def step_for_ever(self):
        engine = self.setup.engine.engine
        while True:
            for record in self.setup.session.book:
                moment = "said its last word" if record.end else len(record.token_ids) + record.num_prior
                if self.moments.get(record.ref.generation_id) == moment:
                    self.cancel(record.ref.generation_id)
                    if isinstance(moment, int) and self.random.random() < 0.5:
                        # Half of them are let through before the next step, which then must free the memory.
                        self.awaited.add(record.ref.generation_id)
                        await eventually(lambda: record.sequence_id in self.aborted)  # noqa: B023
            if engine.has_work():
                aborted, self.aborted = self.aborted, set()
                self.setup.engine.step()
                assert not aborted & set(engine._sequences), "aborted, and still there after a step"
                held = sum(state.slot.num_blocks for state in engine._sequences.values())
                assert engine.load_report().num_free_blocks + held == NUM_BLOCKS
            await asyncio.sleep(self.random.choice([0, 0, 0.002]))


@pytest.mark.parametrize("seed", [1, 2])
async def test_100_random_cancels_leave_one_end_one_charge_and_no_block(rig, serve, model_directory, monkeypatch, seed):
    races = Races(rig, await serve(**ENGINE), seed)
    races.hook_grants(monkeypatch)
    await races.announce()
    await eventually(lambda: bool(rig.parts.registry.ready()))
    stepping = asyncio.create_task(races.step_for_ever())
    prompts = {}
    async with dispatching(rig):
        for number in range(NUM_RACES):
            prompt = f"prompt {number} " + "x" * races.random.randrange(100)
            record = await rig.submit(generation(model_directory, prompt, max_output_tokens=NUM_TOKENS))
            prompts[record.generation_id] = prompt
            races.choose_moment(record)
            if number % (NUM_RACES // NUM_LOSSES) == NUM_RACES // NUM_LOSSES - 1:
                await eventually(lambda: any(map(races.is_in_engine, races.at_requeue)) or stepping.done())
                await races.lose_session()

        async def all_are_final():
            assert not stepping.done(), stepping.exception()
            return all([(await rig.record(each)).state.is_terminal for each in prompts])

        await eventually_answers(all_are_final, within_s=30)
        await eventually(lambda: not len(races.setup.session.book) and not races.setup.engine.engine.has_work())
        await asyncio.gather(*races.cancels.values())
        await rig.parts.reaper.run_once()
        ends = {each: await rig.record(each) for each in prompts}
    stepping.cancel()
    assert races.setup.engine.engine.load_report().num_free_blocks == NUM_BLOCKS
    assert not await rig.dispatch()
    store = rig.stores.store
    for generation_id, prompt in prompts.items():
        end = ends[generation_id]
        assert await rig.record(generation_id) == end, "a final row changed"
        assert end.state is (State.CANCELLED if end.error_reason == CancelCause.CLIENT else State.SUCCEEDED)
        assert end.state is State.SUCCEEDED or generation_id in races.cancels
        assert end.state is State.CANCELLED or generation_id not in races.awaited
        (output,) = await store.read_output_many([generation_id])
        made = list(output.token_ids) if output is not None else []
        assert made == oracle(prompt, NUM_TOKENS)[: end.output_tokens]
        (charge,) = await store.ledger_of(generation_id)
        assert (charge.output_tokens, charge.state) == (len(made), end.state)
        attempts = await store.attempts_of(generation_id)
        assert len(attempts) == end.attempt
        assert all(attempt.ended_at is not None for attempt in attempts)
        (view,) = await rig.stores.log.read_many([(generation_id, 0)])
        assert view.terminal is None or view.terminal.output_tokens == end.output_tokens
        assert await rig.stores.queue.contains_many([(end.model_key, generation_id, end.attempt)]) == [False]
    states = Counter(end.state for end in ends.values())
    assert len(races.awaited) > 0
    assert states[State.CANCELLED] > NUM_RACES // 4, states
