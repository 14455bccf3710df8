"""One worker session as its owning scheduler sees it: what it is expected to run, and the conversation about it."""

import asyncio
from collections.abc import Coroutine
from enum import StrEnum

from opentelemetry import trace

from inference.internal.v1 import worker_pb2
from scheduler.attempt_table import AttemptTable, ExpectedAttempt, HeldAttempt, Overdue
from scheduler.codec import decode_held, decode_load, decode_untried, encode_assignment, encode_ref, encode_verdict
from scheduler.coordinator import ABORT, KEEP, NewsResult
from scheduler.news_writer import NewsWriter
from scheduler.policy import Capacity, prefix_salt
from scheduler.retry import until_available
from scheduler.session_load import PrefixSet, RecentWork, SessionLoad
from scheduler.session_stream import SessionStream, StreamEnd
from scheduler.surroundings import Surroundings
from service_kit.logging import get_logger
from service_kit.telemetry import context_from_traceparent, current_traceparent, tracer
from state_store.model import GenerationRecord, NewSession, State
from state_store.ports import AttemptRef

_log = get_logger()

RECONNECT_WINDOW_S = 0.5
_RETRY_S = 0.1


class SessionExit(StrEnum):
    """How a session left this scheduler."""

    LOST = "LOST"
    """The stream is broken and did not come back, or belongs to somebody else: try to lose it under our epoch."""
    DRAINED = "DRAINED"


class WorkerSession:
    """Owner of one session's attempt table and outbox, under one owner_epoch."""

    def __init__(self, session: NewSession, *, owner_epoch: int, surroundings: Surroundings) -> None:
        self.session = session
        self.owner_epoch = owner_epoch
        self.table = AttemptTable()
        self.load = SessionLoad()
        self.cached_prefixes = PrefixSet()
        self.recent_work = RecentWork()
        self.last_heard_s = surroundings.clock()
        self.is_ready = False
        self.greeted = asyncio.Event()
        """The worker has answered at its address, as this session."""
        self.untried: frozenset[AttemptRef] | None = None
        """What the engine's fatal step ran before it had made a token; None: not known."""
        self._around = surroundings
        self._stream: SessionStream | None = None
        self._writer = NewsWriter(
            table=self.table,
            coordinator=surroundings.coordinator,
            charges=surroundings.charges,
            on_room=surroundings.on_room,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._judging: set[AttemptRef] = set()

    # -- what the dispatcher and the registry ask of it

    def capacity(self) -> Capacity:
        return Capacity(
            session_id=self.session.session_id,
            max_running=self.session.max_running,
            num_outstanding=self.table.num_outstanding(),
            room_blocks=self.load.room_blocks,
            num_blocks=self.session.num_blocks,
            block_size=self.session.block_size,
            unseen_tokens=self.table.unseen_tokens(),
            is_draining=not self.is_ready or self.load.is_draining,
            has_suspect=self.table.has_suspect(),
        )

    def expect(
        self,
        record: GenerationRecord,
        *,
        context_tokens: int | None = None,
        cached_tokens: int = 0,
        is_urgent: bool = False,
    ) -> None:
        """From the commit of the grant on, the worker must name this attempt in time. `context_tokens` is what it needs at
        once, `cached_tokens` what of this the worker probably has; `is_urgent` as its pop says."""
        context_tokens = record.num_prompt_tokens + 1 if context_tokens is None else context_tokens
        span = tracer().start_span(
            "scheduler.attempt",
            context=context_from_traceparent(record.traceparent),
            attributes={"generation_id": record.generation_id, "attempt": record.attempt},
        )
        self.table.expect(
            ExpectedAttempt(
                record=record,
                context_tokens=context_tokens,
                tokens_to_fill=context_tokens - cached_tokens,
                expected_since_s=self._around.clock(),
                span=span,
                is_urgent=is_urgent,
                is_cancel_wanted=record.cancel_cause is not None,
            )
        )

    def assign(self, ref: AttemptRef, output_token_ids: tuple[int, ...]) -> None:
        """Sends an expected attempt; a cancel that came while its log was being opened follows right behind it."""
        known = self.table.find(ref)
        if known is None:
            return
        traceparent = current_traceparent(trace.set_span_in_context(known.span))
        assignment = encode_assignment(
            known.record,
            output_token_ids=output_token_ids,
            priority=known.rank,
            traceparent=traceparent,
            prefix_salt=prefix_salt(known.record.tenant_id, is_shared=self._around.shares_prefixes),
        )
        self._send(worker_pb2.SessionRequest(assign=worker_pb2.Assign(assignments=[assignment])))
        known.is_assigned = True
        known.expected_since_s = self._around.clock()
        if known.is_cancel_wanted:
            self._send_cancel(ref)

    def cancel(self, ref: AttemptRef) -> None:
        """Asks the worker to end an attempt; its last word then ends the generation."""
        known = self.table.want_cancel(ref)
        if known is not None and (known.is_assigned or known.is_seen):  # what it names, another scheduler assigned
            self._send_cancel(ref)

    def is_ending(self, ref: AttemptRef) -> bool:
        """Whether the worker's last word is on its way into the store."""
        return self._writer.is_ending(ref)

    def _send_cancel(self, ref: AttemptRef) -> None:
        self._send(worker_pb2.SessionRequest(cancel=worker_pb2.Cancel(attempts=[encode_ref(ref)])))

    def _send(self, request: worker_pb2.SessionRequest) -> None:
        if self._stream is not None:
            self._stream.send(request)

    # -- the conversation

    async def run(self) -> SessionExit:
        """Talks to the worker until the session is over for this scheduler. Cancelling it hangs up."""
        writer = asyncio.create_task(self._writer.run())
        connection = asyncio.create_task(self._stay_connected())
        try:
            done, _ = await asyncio.wait([writer, connection], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if (error := task.exception()) is not None:
                    # What it says cannot be understood: the worker is not to be trusted with more.
                    _log.error("session_failed", session_id=self.session.session_id, exc_info=error)
                    return SessionExit.LOST
            return connection.result()
        finally:
            tasks = [writer, connection, *self._tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.table.clear()

    async def _stay_connected(self) -> SessionExit:
        broken_since_s: float | None = None
        while True:
            opening = worker_pb2.Open(
                session_id=self.session.session_id,
                owner_epoch=self.owner_epoch,
                scheduler_id=self.session.scheduler_id,
            )
            self._stream = SessionStream(self.session.address, opening, access=self._around.access)
            end = await self._stream.run(self._on_response)
            was_ready, self.is_ready = self.is_ready, False
            if was_ready:
                _log.warning("session_stream_ended", session_id=self.session.session_id, end=end)
            if end is StreamEnd.CLOSED:
                return SessionExit.DRAINED
            now_s = self._around.clock()
            broken_since_s = now_s if was_ready or broken_since_s is None else broken_since_s
            if end is StreamEnd.REFUSED or now_s - broken_since_s >= RECONNECT_WINDOW_S:
                return SessionExit.LOST
            await asyncio.sleep(_RETRY_S)

    async def _on_response(self, response: worker_pb2.SessionResponse) -> None:
        self.last_heard_s = self._around.clock()
        match response.WhichOneof("message"):
            case "hello":
                if response.hello.session_id == self.session.session_id:
                    self.greeted.set()
                held = decode_held(response.hello.held)
                self._take_load(response.hello.load, held)
                self.cached_prefixes.reset(response.hello.cached_prefixes)
                self._spawn(self._greet(held))
            case "heartbeat":
                beat = response.heartbeat
                held = decode_held(beat.held)
                self._take_load(beat.load, held)
                self.cached_prefixes.change(added=beat.cached_prefixes_added, removed=beat.cached_prefixes_removed)
                self._on_heartbeat(held)
            case "delta_batch":
                assert self._stream is not None
                self._writer.put(self._stream, response.delta_batch)
            case "engine_lost":
                self.untried = decode_untried(response.engine_lost)
            case other:
                _log.error("session_response_unknown", message=other)

    def _take_load(self, load: worker_pb2.LoadReport, held: list[HeldAttempt]) -> None:
        self.load = decode_load(load)
        self.table.note_reported(held, num_in_engine=self.load.num_running + self.load.num_waiting)

    async def _greet(self, held: list[HeldAttempt]) -> None:
        """A new stream: verdicts by the log for what the worker holds, a new assignment for what it does not. Beside the
        reading loop, so that heartbeats are answered while a store is away."""
        unknown = self.table.note_named(held)
        known = [attempt for attempt in held if attempt not in unknown]
        missing = self.table.missing_at_hello(held)
        self._judging.update(attempt.ref for attempt in unknown)
        try:
            verdicts = await until_available(
                lambda: self._around.coordinator.judge([(a.ref, a.position) for a in known])
            )
            verdicts.update(await until_available(lambda: self._judge_unknown(unknown)))
        finally:
            self._judging.difference_update(attempt.ref for attempt in unknown)
        self._send(encode_verdict(verdicts))
        for attempt in missing:
            attempt.is_reassigned = True
            self._spawn(self._assign_again(attempt))
        for attempt in self.table.all():
            if attempt.is_cancel_wanted and attempt not in missing:
                self._send_cancel(attempt.ref)
        self.is_ready = True
        self._around.on_room()

    def _on_heartbeat(self, held: list[HeldAttempt]) -> None:
        self.table.note_unnamed(held, self._around.clock())
        unknown = [
            attempt
            for attempt in self.table.note_named(held)
            if not self._writer.is_ending(attempt.ref) and attempt.ref not in self._judging
        ]
        # An answer at once, whatever the stores do: silence would send the worker elsewhere.
        self._send(encode_verdict({a.ref: KEEP for a in held if self.table.find(a.ref) is not None}))
        if unknown:
            self._judging.update(attempt.ref for attempt in unknown)
            self._spawn(self._send_judgement(unknown))
        for attempt, what in self.table.overdue(self._around.clock()):
            if what is Overdue.ASSIGN_AGAIN:
                attempt.is_reassigned = True
                attempt.expected_since_s = self._around.clock()
                self._spawn(self._assign_again(attempt))
        self._around.on_room()

    async def _send_judgement(self, unknown: list[HeldAttempt]) -> None:
        try:
            verdicts = await until_available(lambda: self._judge_unknown(unknown))
        finally:
            self._judging.difference_update(attempt.ref for attempt in unknown)
        self._send(encode_verdict(verdicts))

    async def _judge_unknown(self, unknown: list[HeldAttempt]) -> dict[AttemptRef, NewsResult]:
        """What the worker names and this scheduler does not expect: Postgres knows whether it is this session's."""
        if not unknown:
            return {}
        records = await self._around.store.get_many([attempt.ref.generation_id for attempt in unknown])
        # A final row whose log was not closed: its coordinator died in between.
        await self._around.coordinator.close_logs(
            record for record in records if record is not None and record.state.is_terminal
        )
        verdicts: dict[AttemptRef, NewsResult] = {}
        adopted: list[tuple[AttemptRef, int]] = []
        for attempt, record in zip(unknown, records, strict=True):
            if (
                record is None
                or record.state is not State.RUNNING
                or record.attempt != attempt.ref.attempt
                or record.session_id != self.session.session_id
            ):
                verdicts[attempt.ref] = ABORT
                continue
            self.expect(record)
            self.table.note_named([attempt])
            adopted.append((attempt.ref, attempt.position))
        verdicts.update(await self._around.coordinator.judge(adopted))
        return verdicts

    async def _assign_again(self, attempt: ExpectedAttempt) -> None:
        _log.warning("assigned_again", generation_id=attempt.ref.generation_id, attempt=attempt.ref.attempt)
        output = await until_available(lambda: self._around.assignments.reopen(attempt.record))
        # Where the log refuses, the attempt stays overdue: giving it back asks Postgres, which knows what became of it.
        if output is not None:
            self.assign(attempt.ref, output)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("session_task_failed", session_id=self.session.session_id, exc_info=error)
