"""The life of a worker: engine processes one after another, and the sessions that each of them carries."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

from gpu_worker.announcer import SessionOverError
from gpu_worker.attempts import AttemptRecord
from gpu_worker.cached_prefixes import CachedPrefixes
from gpu_worker.engine.frames import OutputFrame, RefusedFrame
from gpu_worker.engine.port import Capabilities, LoadReport, SequenceFinish
from gpu_worker.session import EngineLink, WorkerSession
from gpu_worker.session_stream import StreamTimes
from gpu_worker.supervisor import EngineLostError, HangLimits
from gpu_worker.tasks import run_until_first
from service_kit.errors import AbortedError
from service_kit.ids import new_session_id
from service_kit.logging import get_logger

_log = get_logger()


class SupervisedEngine(EngineLink, Protocol):
    """What a worker needs of an engine process; see EngineProcess."""

    @property
    def is_progressing(self) -> bool: ...

    async def wait_ready(self, timeout: timedelta) -> Capabilities: ...

    async def next_frame(self) -> OutputFrame | RefusedFrame: ...

    async def ack(self, step: int) -> None: ...

    async def watch(self, limits: HangLimits) -> None: ...

    def read_untried(self) -> tuple[str, ...] | None: ...

    async def close(self, grace: timedelta) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTimes:
    """`start`: loading and warm-up. `drain`: for what runs when the worker is told to stop. `restart_wait`: before a new
    engine process, doubled up to `max_restart_wait` while engines die without having been ready."""

    start: timedelta = timedelta(minutes=10)
    drain: timedelta = timedelta(seconds=20)
    engine_close: timedelta = timedelta(seconds=5)
    restart_wait: timedelta = timedelta(milliseconds=500)
    max_restart_wait: timedelta = timedelta(seconds=10)
    hang: HangLimits = field(default_factory=HangLimits)
    stream: StreamTimes = field(default_factory=StreamTimes)


class Worker:
    """Owner of the current engine process and session.

    A session ends with its engine; a new one begins with a new engine, or when the schedulers count the old one as over.
    """

    def __init__(
        self,
        *,
        spawn: Callable[[], Awaitable[SupervisedEngine]],
        announce: Callable[[WorkerSession], Coroutine[Any, Any, None]],
        times: WorkerTimes,
        clock: Callable[[], float],
        on_finish: Callable[[AttemptRecord, SequenceFinish, LoadReport], None],
        on_load: Callable[[LoadReport], None] = lambda _load: None,
    ) -> None:
        """`on_load` hears the report of every step of every engine."""
        self._spawn = spawn
        self._announce = announce
        self._times = times
        self._clock = clock
        self._on_finish = on_finish
        self._on_load = on_load
        self._engine: SupervisedEngine | None = None
        self._prefixes = CachedPrefixes()
        self._session: WorkerSession | None = None
        self._drain_wanted = asyncio.Event()

    @property
    def session(self) -> WorkerSession | None:
        """The session that streams may open now."""
        return self._session

    @property
    def is_ready(self) -> bool:
        """Whether it is sensible to give this worker new work."""
        is_progressing = self._engine is not None and self._engine.is_progressing
        return self._session is not None and is_progressing and not self._drain_wanted.is_set()

    def drain(self) -> None:
        """Begins the end: no new work; `run` returns when all is finished and acknowledged, or the drain time is over."""
        self._drain_wanted.set()
        if self._session is not None:
            self._session.drain()

    async def run(self) -> None:
        """Until it has drained. Raises EngineLostError when the first engine does not become ready: a configuration
        error, which a restart would not cure."""
        has_been_ready = False
        wait = self._times.restart_wait
        while not self._drain_wanted.is_set():
            engine = await self._spawn()
            is_ready = False
            try:
                capabilities = await self._wait_ready(engine)
                if capabilities is None:
                    return
                is_ready = has_been_ready = True
                _log.info(
                    "engine_ready",
                    engine=capabilities.engine,
                    model=capabilities.model,
                    kv_dtype=capabilities.kv_dtype,
                    is_batch_invariant=capabilities.is_batch_invariant,
                    **capabilities.details,
                )
                await self._serve(engine, capabilities)
            except EngineLostError as error:
                self._take_loss(engine, error)
                if not has_been_ready:
                    raise
            finally:
                self._end_session(AbortedError("the session ended with its engine"))
                await engine.close(self._times.engine_close)
            wait = self._times.restart_wait if is_ready else min(2 * wait, self._times.max_restart_wait)
            await self._wait_or_drain(wait)

    def _take_loss(self, engine: SupervisedEngine, error: EngineLostError) -> None:
        untried = engine.read_untried()
        num_untried = len(untried) if untried is not None else None
        _log.error("engine_lost", reason=str(error), num_untried=num_untried)
        if self._session is not None:
            self._session.end_with_engine(untried)
            self._session = None

    async def _wait_ready(self, engine: SupervisedEngine) -> Capabilities | None:
        """None when the worker is to drain before the engine is ready."""
        found: list[Capabilities] = []

        async def wait() -> None:
            found.append(await engine.wait_ready(self._times.start))

        await run_until_first(wait(), _wait(self._drain_wanted))
        return found[0] if found else None

    async def _serve(self, engine: SupervisedEngine, capabilities: Capabilities) -> None:
        """Returns when the worker has drained; raises EngineLostError."""
        self._engine = engine
        self._prefixes = CachedPrefixes()  # a new engine's cache is empty
        self._begin_session(engine, capabilities)
        await run_until_first(
            self._pump(engine),
            self._watch(engine),
            self._keep_owned(engine, capabilities),
            self._wait_drained(),
        )

    async def _pump(self, engine: SupervisedEngine) -> None:
        """Frames go to the session that is current; what belongs to an earlier one finds no record there."""
        num_pauses = 0
        while True:
            frame = await engine.next_frame()
            if self._session is not None:
                self._session.take_frame(frame)
            if isinstance(frame, OutputFrame):
                self._on_load(frame.load)
                await engine.ack(frame.output.step)
                if frame.num_pauses > num_pauses:
                    num_pauses = frame.num_pauses
                    _log.warning("engine_paused", num_pauses=num_pauses)  # this process was too slow for it

    async def _watch(self, engine: SupervisedEngine) -> None:
        await engine.watch(self._times.hang)
        raise EngineLostError("hung: no progress")

    async def _keep_owned(self, engine: SupervisedEngine, capabilities: Capabilities) -> None:
        while True:
            session = self._session
            assert session is not None
            try:
                await self._announce(session)
            except SessionOverError as error:
                _log.warning("session_over", session_id=session.session_id, reason=str(error))
                self._end_session(AbortedError("the session is over"))
                self._begin_session(engine, capabilities, load=session.load)
                await engine.abort([record.sequence_id for record in session.book if record.end is None])

    async def _wait_drained(self) -> None:
        await self._drain_wanted.wait()
        try:
            async with asyncio.timeout(self._times.drain.total_seconds()):
                while (session := self._session) is not None:
                    await session.emptied.wait()
                    if session is self._session:
                        break
        except TimeoutError:
            _log.warning("drain_time_over", num_left=len(self._session.book) if self._session is not None else 0)
        self._end_session(None)

    async def _wait_or_drain(self, wait: timedelta) -> None:
        try:
            async with asyncio.timeout(wait.total_seconds()):
                await self._drain_wanted.wait()
        except TimeoutError:
            return

    def _begin_session(
        self, engine: SupervisedEngine, capabilities: Capabilities, load: LoadReport | None = None
    ) -> None:
        """`load` is the engine's latest report, if it has served a session before."""
        self._session = WorkerSession(
            session_id=new_session_id(),
            capabilities=capabilities,
            engine=engine,
            times=self._times.stream,
            clock=self._clock,
            prefixes=self._prefixes,
            load=load,
            on_finish=self._on_finish,
        )
        if self._drain_wanted.is_set():
            self._session.drain()
        _log.info("session_begun", session_id=self._session.session_id)

    def _end_session(self, error: AbortedError | None) -> None:
        """None: in good order. Streams are told; no new one can open."""
        if self._session is not None:
            self._session.end(error)
        self._session = None


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


async def report_readiness(worker: Worker, report: Callable[[bool], Awaitable[None]], *, interval: timedelta) -> None:
    """Passes changes of `is_ready` on, until cancelled."""
    reported = False
    while True:
        if worker.is_ready != reported:
            reported = not reported
            await report(reported)
        await asyncio.sleep(interval.total_seconds())
