"""A whole scheduler with workers of the simulated engine, in one process and without a network: time passes in steps.

Everything but the wire is the real thing: what would travel on a session's stream is handed over directly.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from gpu_worker import codec
from gpu_worker.attempts import AttemptNews, AttemptRef, HeldAttempt
from gpu_worker.engine.port import CacheChanges, SequenceSpec
from gpu_worker.engine.simulated import SimulatedEngine, SimulatedWorld, load_simulated_engine
from gpu_worker.engine.simulated_settings import SimulatedSettings
from gpu_worker.session_stream import BatchMessage, OutgoingMessage, StateMessage
from inference.internal.v1 import worker_pb2
from scheduler.codec import decode_batch
from scheduler.queue.memory import MemoryAdmissionQueue
from scheduler.queue.settings import QueueSettings
from scheduler.wiring import Clocks, Parts, build
from scheduler.worker_session import WorkerSession
from service_kit.ids import GenerationId, SchedulerId, new_session_id
from service_kit.model_manifest import read_manifest
from state_store.delta_log.memory import MemoryDeltaLog
from state_store.memory.store import MemoryStore
from state_store.model import ModelKey, NewGeneration, NewSession
from tests.support.generations import LEASE
from tests.support.scheduler_rig import ManualClock, make_config

HEARTBEAT_STEPS = 50
AFTER_END_STEPS = 3
"""As StreamTimes has them, at 20 ms a step."""


@dataclass(slots=True, kw_only=True)
class SimulatedWorker:
    """An engine and its session. It is the stream that the session sends to."""

    engine: SimulatedEngine
    session: WorkerSession
    refs: dict[GenerationId, AttemptRef] = field(default_factory=dict)
    """What the engine has, in the order in which it came."""
    given: list[GenerationId] = field(default_factory=list)
    """All that it ever got."""
    ends: dict[GenerationId, int] = field(default_factory=dict)
    """Number of output tokens of what has ended."""
    _num_batches: int = 0
    _steps_to_beat: int = HEARTBEAT_STEPS
    _changes: list[CacheChanges] = field(default_factory=list)

    def send(self, request: worker_pb2.SessionRequest) -> None:
        for message in request.assign.assignments:
            ref = AttemptRef(generation_id=GenerationId(message.generation_id), attempt=message.attempt)
            given = codec.decode_assignment(message, ref)
            self.engine.add(
                SequenceSpec(
                    sequence_id=ref.generation_id,
                    prompt_token_ids=given.prompt_token_ids,
                    output_token_ids=given.output_token_ids,
                    sampling=given.sampling,
                    priority=given.priority,
                    nonce=given.nonce,
                    prefix_salt=given.prefix_salt,
                )
            )
            self.refs[ref.generation_id] = ref
            self.given.append(ref.generation_id)

    async def step(self) -> None:
        """Computes one step and hands over what it made; reports when that is due."""
        if self.engine.has_work():
            await self._compute()
        self._steps_to_beat -= 1
        if self._steps_to_beat <= 0:
            await self.beat()

    async def _compute(self) -> None:
        output = self.engine.step()
        self._changes.append(output.cache_changes)
        news = []
        for each in output.outputs:
            generation_id = GenerationId(each.sequence_id)
            news.append(AttemptNews(ref=self.refs[generation_id], delta=each.delta, end=each.finish))
            if each.finish is not None:
                self.ends[generation_id] = each.finish.output_tokens
                del self.refs[generation_id]
                self._steps_to_beat = min(self._steps_to_beat, AFTER_END_STEPS)
        self._num_batches += 1
        batch = self._encode(BatchMessage(batch=self._num_batches, news=tuple(news))).delta_batch
        decoded = decode_batch(batch)
        results = await self.session._around.coordinator.append(decoded)
        self.session._writer._apply(cast("Any", self), decoded, results)
        await asyncio.gather(*self.session._writer._ends.values())

    async def beat(self) -> None:
        """A heartbeat."""
        self._steps_to_beat = HEARTBEAT_STEPS
        changes, self._changes = self._changes, []
        prefixes = CacheChanges(
            added=tuple(digest for change in changes for digest in change.added),
            removed=tuple(digest for change in changes for digest in change.removed),
        )
        held = tuple(HeldAttempt(ref=ref, position=0, is_finished=False) for ref in self.refs.values())
        load = self.engine.load_report()
        state = StateMessage(is_hello=False, load=load, is_draining=False, held=held, prefixes=prefixes)
        await self.session._on_response(self._encode(state))

    def _encode(self, message: OutgoingMessage) -> worker_pb2.SessionResponse:
        return codec.encode_outgoing(
            message, session_id=self.session.session.session_id, capabilities=self.engine.capabilities()
        )


class SimulatedStack:
    """One scheduler over memory twins and its workers. `step_s` is how long a step of an engine takes."""

    def __init__(self, directory: Path, *, step_s: float = 0.02, queue_settings: QueueSettings | None = None) -> None:
        self.clock = ManualClock()
        self.workers: list[SimulatedWorker] = []
        self.store = MemoryStore(clock=self.clock.now)
        self.log = MemoryDeltaLog(self.clock.now)
        self.queue = MemoryAdmissionQueue(self.clock.now, queue_settings)
        self.parts: Parts = build(
            make_config(),
            store=self.store,
            log=self.log,
            queue=self.queue,
            clocks=Clocks(monotonic_s=self.clock, now=self.clock.now),
        )
        manifest = read_manifest(directory)
        self.model_key = ModelKey(revision=manifest.revision, precision=manifest.precision)
        self._directory = directory
        self._step_s = step_s

    async def start(self, num_workers: int, **settings: Any) -> None:
        """Starts workers whose engines have these settings."""
        await self.parts.reaper.rebuild_queue()
        for _ in range(num_workers):
            await self._add_worker(SimulatedSettings(**settings))

    async def _add_worker(self, settings: SimulatedSettings) -> None:
        world = SimulatedWorld(clock=self.clock, sleep=self.clock.advance)
        engine = load_simulated_engine(self._directory, settings=settings, world=world)
        sizes = engine.capabilities()
        new = NewSession(
            session_id=new_session_id(),
            worker_id=f"worker-{len(self.workers)}",
            address="127.0.0.1:1",
            scheduler_id=SchedulerId("scheduler"),
            model=sizes.model,
            model_key=self.model_key,
            context_length=sizes.context_length,
            num_blocks=sizes.num_blocks,
            block_size=sizes.block_size,
            max_running=sizes.max_running,
        )
        opened = await self.store.open_session(new, lease=LEASE)
        session = self.parts.registry._make_session(new, opened.owner_epoch)
        worker = SimulatedWorker(engine=engine, session=session)
        session._stream = cast("Any", worker)
        self.parts.registry._sessions[new.session_id] = (session, cast("Any", None))
        await worker.beat()
        session.is_ready = True
        self.workers.append(worker)

    async def submit(self, generation: NewGeneration) -> GenerationId:
        result = await self.parts.admission.submit(generation, has_seed=True)
        return result.record.generation_id

    async def step(self) -> None:
        """Dispatches, then every engine computes one step and output is charged."""
        while await self.parts.dispatcher.run_once():
            pass
        for worker in self.workers:
            await worker.step()
        self.clock.advance(self._step_s)
        await self.parts.charges.flush_once()

    def ends(self) -> dict[GenerationId, int]:
        return {key: tokens for worker in self.workers for key, tokens in worker.ends.items()}

    async def run_until_ended(self, generation_ids: Sequence[GenerationId], *, max_steps: int) -> None:
        for _ in range(max_steps):
            if set(generation_ids) <= self.ends().keys():
                return
            await self.step()
        raise AssertionError("it does not come to an end")
