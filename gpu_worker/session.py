"""One worker session: its attempts, its engine, and the one stream to the scheduler that owns it."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, assert_never

from gpu_worker.attempts import (
    Assignment,
    AttemptBook,
    AttemptRecord,
    AttemptRef,
    EngineCalls,
    VerdictAction,
    failed_finish,
)
from gpu_worker.cached_prefixes import CachedPrefixes
from gpu_worker.engine.frames import OutputFrame, RefusedFrame
from gpu_worker.engine.port import (
    CacheChanges,
    Capabilities,
    LoadReport,
    SequenceFinish,
    SequenceOutput,
    SequenceSpec,
)
from gpu_worker.session_stream import EngineLostMessage, SessionStream, StateMessage, StreamTimes
from service_kit.errors import AbortedError, InvalidArgumentError, SluiceError
from service_kit.ids import SchedulerId, SessionId
from service_kit.logging import get_logger

_log = get_logger()


class EngineLink(Protocol):
    """What a session asks of its engine. Raises EngineLostError."""

    async def add(self, specs: Sequence[SequenceSpec]) -> None: ...

    async def abort(self, sequence_ids: Sequence[str]) -> None: ...


class WorkerSession:
    """Owner of one incarnation's attempts. Commands come from the current stream, in order; frames from the engine.

    `prefixes` and the latest `load` are the engine process's, which may carry several sessions one after another.
    """

    def __init__(
        self,
        *,
        session_id: SessionId,
        capabilities: Capabilities,
        engine: EngineLink,
        times: StreamTimes,
        clock: Callable[[], float],
        prefixes: CachedPrefixes | None = None,
        load: LoadReport | None = None,
        on_finish: Callable[[AttemptRecord, SequenceFinish, LoadReport], None] = lambda _record, _finish, _load: None,
    ) -> None:
        self.session_id = session_id
        self.capabilities = capabilities
        self.book = AttemptBook(session_id)
        self.load = load if load is not None else _empty_load(capabilities)
        self.is_draining = False
        self.was_silent = False
        """Whether the last stream ended because its scheduler said nothing; whoever announces clears it."""
        self.connected = asyncio.Event()
        self.disconnected = asyncio.Event()
        self.disconnected.set()
        self.emptied = asyncio.Event()
        """Set when nothing is left to wait for: the session drains and holds nothing, or it is over."""
        self._engine = engine
        self._times = times
        self._clock = clock
        self._prefixes = prefixes if prefixes is not None else CachedPrefixes()
        self._on_finish = on_finish
        self._stream: SessionStream | None = None
        self._last_owner = (0, SchedulerId(""))
        self._ended: SluiceError | None = None

    # -- streams

    def open_stream(self, *, session_id: SessionId, owner_epoch: int, scheduler_id: SchedulerId) -> SessionStream:
        """Makes a new stream the current one. Raises AbortedError for another session or an owner that was superseded.

        The same owner may come back under its epoch: its connection broke, and this side may not have noticed.
        """
        if owner_epoch < 1:
            raise InvalidArgumentError("open.owner_epoch", "must be at least 1")
        if self._ended is not None:
            raise self._ended
        if session_id != self.session_id:
            raise AbortedError(f"this worker's session is {self.session_id}")
        last_epoch, last_scheduler = self._last_owner
        if owner_epoch < last_epoch or (owner_epoch == last_epoch and scheduler_id != last_scheduler):
            raise AbortedError(f"owner_epoch {owner_epoch} is superseded by {last_epoch}")
        if self._stream is not None:
            self._stream.close(AbortedError(f"replaced by a stream of owner_epoch {owner_epoch}"))
        self._last_owner = (owner_epoch, scheduler_id)
        self.book.begin_stream()
        self._stream = SessionStream(
            self,
            owner_epoch=owner_epoch,
            scheduler_id=scheduler_id,
            prefixes=self._prefixes.begin_feed(),
            times=self._times,
            clock=self._clock,
        )
        self.disconnected.clear()
        self.connected.set()
        _log.info("session_stream_opened", session_id=self.session_id, owner_epoch=owner_epoch)
        return self._stream

    def release_stream(self, stream: SessionStream) -> None:
        """The stream is over; does nothing when another one has taken its place."""
        if self._stream is stream:
            self._stream = None
            self.connected.clear()
            self.disconnected.set()
            _log.info("session_stream_ended", session_id=self.session_id, owner_epoch=stream.owner_epoch)

    def end_with_engine(self, untried: Collection[str] | None) -> None:
        """The engine is lost, and the session with it. `untried`: sequences that its fatal step ran before they had made a
        token in it; None when it did not die in a step."""
        self._ended = AbortedError("the session ended with its engine")
        self.emptied.set()
        if self._stream is not None:
            refs = None if untried is None else tuple(r.ref for r in self.book if r.sequence_id in untried)
            self._stream.close_after(EngineLostMessage(untried=refs))

    def end(self, error: SluiceError | None) -> None:
        """The session is over (None: it has drained); streams end, and new ones are refused."""
        self._ended = error or AbortedError("the worker has drained")
        self.emptied.set()
        if self._stream is not None:
            self._stream.close(error)

    def state_message(self, prefixes: CacheChanges, *, is_hello: bool) -> StateMessage:
        return StateMessage(
            is_hello=is_hello,
            load=self.load,
            is_draining=self.is_draining,
            held=self.book.held(),
            prefixes=prefixes,
        )

    # -- what the scheduler says

    async def assign(self, assignments: Sequence[Assignment]) -> None:
        """Runs new attempts; known ones are sent again from behind the assigned output. A draining worker takes none:
        it does not name them, so that they are assigned elsewhere."""
        calls = []
        for assignment in assignments:
            if self.is_draining and self.book.find(assignment.ref) is None:
                _log.info("assignment_left_while_draining", **_fields(assignment.ref))
                continue
            calls.append(self.book.assign(assignment))
        await self._tell_engine(calls)

    async def refuse(self, ref: AttemptRef, failure: str, *, num_prior: int) -> None:
        """Ends an assignment that makes no sense, so that it is not assigned again for ever."""
        _log.error("assignment_refused", reason=failure, **_fields(ref))
        await self._tell_engine([self.book.fail(ref, failure, num_prior=num_prior)])

    async def cancel(self, refs: Sequence[AttemptRef]) -> None:
        await self._tell_engine([self.book.cancel(ref) for ref in refs])

    async def acknowledge_ends(self, refs: Sequence[AttemptRef]) -> None:
        """Forgets the attempts."""
        await self._tell_engine([self.book.forget(ref) for ref in refs])

    async def judge(self, ref: AttemptRef, action: VerdictAction, resend_from: int) -> None:
        match action:
            case VerdictAction.KEEP:
                self.book.keep(ref)
            case VerdictAction.RESEND_FROM:
                record = self.book.find(ref)
                if record is not None and resend_from <= record.num_prior:
                    # Earlier attempts' output is in the log or in Postgres, never here: the answer begins behind it.
                    _log.warning("resend_below_assignment", resend_from=resend_from, **_fields(ref))
                self.book.resend_from(ref, resend_from)
            case VerdictAction.ABORT:
                _log.warning("attempt_aborted", **_fields(ref))
                await self._tell_engine([self.book.forget(ref)])
            case _:
                assert_never(action)
        self._wake()

    def drain(self) -> None:
        """Takes no new attempts from now on."""
        self.is_draining = True
        self._note_emptied()
        self._wake()

    # -- what the engine says

    def take_frame(self, frame: OutputFrame | RefusedFrame) -> None:
        match frame:
            case OutputFrame():
                self.load = frame.load
                self._prefixes.apply(frame.output.cache_changes)
                for output in frame.output.outputs:
                    record = self.book.take_output(output)
                    if record is not None and output.finish is not None:
                        self._on_finish(record, output.finish, frame.load)
            case RefusedFrame():
                self._take_refusal(frame)
            case _:
                assert_never(frame)
        self._wake()

    def _take_refusal(self, frame: RefusedFrame) -> None:
        """What the engine can never run ends as a failure."""
        record = self.book.find_sequence(frame.sequence_id)
        if record is None:
            return
        _log.warning("sequence_refused", reason=frame.reason, **_fields(record.ref))
        finish = failed_finish(record, frame.reason)
        self.book.take_output(SequenceOutput(sequence_id=frame.sequence_id, finish=finish))

    async def _tell_engine(self, calls: Sequence[EngineCalls]) -> None:
        aborts = [call.abort for call in calls if call.abort is not None]
        adds = [call.add for call in calls if call.add is not None]
        self._note_emptied()
        self._wake()
        if aborts:
            await self._engine.abort(aborts)
        if adds:
            await self._engine.add(adds)

    def _note_emptied(self) -> None:
        if self.is_draining and not len(self.book):
            self.emptied.set()

    def _wake(self) -> None:
        if self._stream is not None:
            self._stream.wake.set()


def _fields(ref: AttemptRef) -> dict[str, object]:
    return {"generation_id": ref.generation_id, "attempt": ref.attempt}


def _empty_load(capabilities: Capabilities) -> LoadReport:
    """Before the engine's first step."""
    return LoadReport(
        step=0,
        num_running=0,
        num_waiting=0,
        max_running=capabilities.max_running,
        largest_batch=0,
        num_free_blocks=capabilities.num_blocks,
        num_blocks=capabilities.num_blocks,
        block_size=capabilities.block_size,
        kv_waste=0.0,
        room_blocks=(capabilities.num_blocks,) * 3,
    )
