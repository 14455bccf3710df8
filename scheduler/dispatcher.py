"""Gives queued generations to sessions with room: pop → commit the grant → open the log → assign what open returned."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from datetime import datetime

from scheduler.assignments import Assignments
from scheduler.policy import room_of
from scheduler.queue.port import AdmissionQueue, Popped
from scheduler.session_registry import SessionRegistry
from scheduler.worker_session import WorkerSession
from service_kit.crash_point import CrashPoints
from service_kit.errors import UnavailableError
from service_kit.logging import get_logger
from service_kit.telemetry import record_span
from state_store.model import GenerationRecord
from state_store.ports import AttemptRef, GenerationStore, GrantKind, GrantRequest

_log = get_logger()

POLL_S = 0.05
"""How soon work that another scheduler queued is noticed."""
_UNAVAILABLE_PAUSE_S = 0.25
MAX_POP = 16
"""Entries per pop, so that sessions of one model share what is there."""


class Dispatcher:
    """One per scheduler process; several schedulers may dispatch from the same queue."""

    def __init__(
        self,
        *,
        store: GenerationStore,
        queue: AdmissionQueue,
        assignments: Assignments,
        registry: SessionRegistry,
        crash_points: CrashPoints,
        now: Callable[[], datetime],
    ) -> None:
        self._store = store
        self._queue = queue
        self._assignments = assignments
        self._registry = registry
        self._crash_points = crash_points
        self._now = now
        self._wake = asyncio.Event()
        self.is_draining = False

    def wake(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        """Dispatches until cancelled."""
        while True:
            pause_s = POLL_S
            self._wake.clear()
            try:
                while not self.is_draining and await self.run_once():
                    pass
            except UnavailableError as error:
                _log.warning("dispatch_unavailable", reason=error.reason, error=str(error))
                pause_s = _UNAVAILABLE_PAUSE_S
            except Exception:  # noqa: BLE001 - one bad round must not end the scheduler
                _log.exception("dispatch_failed")
                pause_s = _UNAVAILABLE_PAUSE_S
            try:
                await asyncio.wait_for(self._wake.wait(), timeout=pause_s)
            except TimeoutError:
                continue

    async def run_once(self) -> bool:
        """One pop for each session with room; whether anything was granted."""
        has_granted = False
        for session in self._registry.ready():
            room = room_of(session.capacity())
            if not any(room.max_entries):
                continue
            popped = await self._queue.pop(session.session.model_key, [room], max_entries=MAX_POP)
            if popped:
                has_granted |= await self._grant(session, popped)
        return has_granted

    async def _grant(self, session: WorkerSession, popped: Sequence[Popped]) -> bool:
        """If this dies before the grant, the in-flight entries come back within 5 s; after it, the session's owner finds
        the row and assigns it."""
        self._crash_points.hit("queue.popped")
        results = await self._store.grant_many(
            [
                GrantRequest(
                    generation_id=item.entry.generation_id,
                    after_attempt=item.entry.attempt,
                    session_id=session.session.session_id,
                    owner_epoch=session.owner_epoch,
                    nonce=secrets.randbits(64),
                )
                for item in popped
            ]
        )
        self._crash_points.hit("grant.committed")
        granted = [r.record for r in results if r.kind is GrantKind.GRANTED and r.record is not None]
        for record in granted:
            session.expect(record)
            self._record_wait(record)
        await self._assign(session, granted)
        for kind, settle in (
            (GrantKind.GRANTED, self._queue.ack_many),
            (GrantKind.NOT_QUEUED, self._queue.drop_many),
            (GrantKind.FENCED, self._queue.return_many),
        ):
            await settle([item for item, r in zip(popped, results, strict=True) if r.kind is kind])
        return bool(granted)

    async def _assign(self, session: WorkerSession, granted: Sequence[GenerationRecord]) -> None:
        if not granted:
            return
        outputs = await self._assignments.open_many(granted)
        for record, output in zip(granted, outputs, strict=True):
            if output is not None:
                session.assign(AttemptRef(generation_id=record.generation_id, attempt=record.attempt), output)

    def _record_wait(self, record: GenerationRecord) -> None:
        record_span(
            "scheduler.queue_wait",
            start_unix_ns=int(record.created_at.timestamp() * 1e9),
            end_unix_ns=int(self._now().timestamp() * 1e9),
            parent=record.traceparent,
            attributes={"generation_id": record.generation_id, "attempt": record.attempt},
        )
