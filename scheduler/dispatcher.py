"""Gives queued generations to sessions with room: pop → route → commit the grants → open the logs → assign what open returned."""

import asyncio
import contextlib
import secrets
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import datetime

from scheduler.assignments import Assignments
from scheduler.policy import prefix_salt, room_of
from scheduler.queue.port import AdmissionQueue, ByClass, Popped, SessionRoom
from scheduler.routing import Candidate, Digests, Routable, Route, prompt_digests, route
from scheduler.session_registry import SessionRegistry
from scheduler.worker_session import WorkerSession
from service_kit.crash_point import CrashPoints
from service_kit.errors import UnavailableError
from service_kit.logging import get_logger
from service_kit.prefix_hash import model_fingerprint
from service_kit.telemetry import record_span
from state_store.model import GenerationRecord, ModelKey, PriorityClass
from state_store.ports import AttemptRef, GenerationStore, GrantKind, GrantRequest, GrantResult

_log = get_logger()

POLL_S = 0.25
"""How often the queue is looked at without a hint: for entries whose time has come, and for hints that were lost."""
_UNAVAILABLE_PAUSE_S = 0.25
MAX_POP = 16
"""Entries per pop and session, so that sessions of one model that other schedulers own get some as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Destination:
    """Where a popped entry goes."""

    popped: Popped
    session: WorkerSession
    route: Route


class Dispatcher:
    """One per scheduler process; several schedulers may dispatch from the same queue, each to its own sessions."""

    def __init__(
        self,
        *,
        store: GenerationStore,
        queue: AdmissionQueue,
        assignments: Assignments,
        registry: SessionRegistry,
        crash_points: CrashPoints,
        clock: Callable[[], float],
        now: Callable[[], datetime],
        shares_prefixes: bool,
    ) -> None:
        """`clock` is monotonic seconds; `shares_prefixes` as for the sessions."""
        self._store = store
        self._queue = queue
        self._assignments = assignments
        self._registry = registry
        self._crash_points = crash_points
        self._clock = clock
        self._now = now
        self._shares_prefixes = shares_prefixes
        self._wake = asyncio.Event()
        self.is_draining = False

    def wake(self) -> None:
        self._wake.set()

    async def follow(self, news: AsyncGenerator[None, None]) -> None:
        """Wakes at each of the queue's news, until cancelled."""
        async with aclosing(news) as hints:
            async for _ in hints:
                self.wake()

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
            # Not wait_for: before Python 3.12 it loses a cancellation that comes together with the wake.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()

    async def run_once(self) -> bool:
        """One pop for each model whose sessions have room; whether anything was granted."""
        sessions_by_model: defaultdict[ModelKey, list[WorkerSession]] = defaultdict(list)
        for session in self._registry.ready():
            sessions_by_model[session.session.model_key].append(session)
        has_granted = False
        for model_key, sessions in sessions_by_model.items():
            has_granted |= await self._dispatch(model_key, sessions)
        return has_granted

    async def _dispatch(self, model_key: ModelKey, sessions: Sequence[WorkerSession]) -> bool:
        rooms = {session: room for session in sessions if any((room := room_of(session.capacity())).max_entries)}
        if not rooms:
            return False
        wanted = [replace(room, max_entries=_at_most(MAX_POP, room.max_entries)) for room in rooms.values()]
        popped = await self._queue.pop(model_key, wanted, max_entries=MAX_POP * len(wanted))
        if not popped:
            return False
        # If this dies before the grants, the in-flight entries come back; after them, the sessions' owner finds the rows.
        self._crash_points.hit("queue.popped")
        return await self._grant(await self._route(model_key, popped, rooms))

    async def _route(
        self, model_key: ModelKey, popped: Sequence[Popped], rooms: dict[WorkerSession, SessionRoom]
    ) -> list[_Destination]:
        """With several sessions to choose from, the prompts are looked at."""
        sessions = {session.session.session_id: session for session in rooms}
        candidates = [self._candidate(session, room) for session, room in rooms.items()]
        digests = await self._digests(model_key, popped, candidates) if len(candidates) > 1 else [{}] * len(popped)
        items = [
            Routable(
                session_id=each.session_id,
                kept=each.kept,
                priority_class=PriorityClass.from_rank(each.rank),
                max_tokens=each.entry.max_tokens,
                is_charged=each.entry.is_charged,
                digests=known,
            )
            for each, known in zip(popped, digests, strict=True)
        ]
        routes = route(items, candidates, now_s=self._clock())
        return [
            _Destination(popped=each, session=sessions[found.session_id], route=found)
            for each, found in zip(popped, routes, strict=True)
        ]

    def _candidate(self, session: WorkerSession, room: SessionRoom) -> Candidate:
        return Candidate(
            session_id=session.session.session_id,
            block_size=session.session.block_size,
            max_running=session.session.max_running,
            max_entries=room.max_entries,
            max_tokens=room.max_tokens,
            max_charged=room.max_charged,
            num_attempts=session.table.num_outstanding(),
            tokens_to_fill=session.table.tokens_to_fill(),
            recent_tokens=session.recent_work.at(self._clock()),
            prefixes=session.cached_prefixes,
        )

    async def _digests(
        self, model_key: ModelKey, popped: Sequence[Popped], candidates: Sequence[Candidate]
    ) -> list[dict[int, Digests]]:
        """Of the prompts, by block size."""
        fingerprint = model_fingerprint(revision=model_key.revision, precision=model_key.precision)
        block_sizes = {candidate.block_size for candidate in candidates}
        records = await self._store.get_many([each.entry.generation_id for each in popped])
        return [
            prompt_digests(
                record.prompt_token_ids,
                fingerprint=fingerprint,
                tenant_salt=prefix_salt(record.tenant_id, is_shared=self._shares_prefixes),
                block_sizes=block_sizes,
            )
            if record is not None
            else {}
            for record in records
        ]

    async def _grant(self, destinations: Sequence[_Destination]) -> bool:
        results = await self._store.grant_many(
            [
                GrantRequest(
                    generation_id=each.popped.entry.generation_id,
                    after_attempt=each.popped.entry.attempt,
                    session_id=each.session.session.session_id,
                    owner_epoch=each.session.owner_epoch,
                    nonce=secrets.randbits(64),
                )
                for each in destinations
            ]
        )
        self._crash_points.hit("grant.committed")
        granted: list[tuple[_Destination, GenerationRecord]] = []
        for each, result in zip(destinations, results, strict=True):
            if result.record is not None:
                granted.append((each, result.record))
                self._expect(each, result.record)
        try:
            await self._assign(granted)
        finally:
            await self._settle(destinations, results)
        return bool(granted)

    def _expect(self, destination: _Destination, record: GenerationRecord) -> None:
        context_tokens, found = destination.popped.entry.max_tokens, destination.route
        destination.session.expect(
            record,
            context_tokens=context_tokens,
            cached_tokens=found.cached_tokens,
            is_urgent=destination.popped.is_urgent,
        )
        destination.session.cached_prefixes.expect(found.digests, now_s=self._clock())
        destination.session.recent_work.add(context_tokens - found.cached_tokens, now_s=self._clock())
        record_span(
            "scheduler.queue_wait",
            start_unix_ns=int(record.created_at.timestamp() * 1e9),
            end_unix_ns=int(self._now().timestamp() * 1e9),
            parent=record.traceparent,
            attributes={"generation_id": record.generation_id, "attempt": record.attempt},
        )

    async def _assign(self, granted: Sequence[tuple[_Destination, GenerationRecord]]) -> None:
        if not granted:
            return
        outputs = await self._assignments.open_many([record for _, record in granted])
        for (destination, record), output in zip(granted, outputs, strict=True):
            if output is not None:
                ref = AttemptRef(generation_id=record.generation_id, attempt=record.attempt)
                destination.session.assign(ref, output)

    async def _settle(self, destinations: Sequence[_Destination], results: Sequence[GrantResult]) -> None:
        """Tells the queue what became of the pops. A session that a grant was fenced off takes nothing more: it is somebody
        else's by now, and is dropped when its lease cannot be renewed."""
        by_kind: dict[GrantKind, list[Popped]] = {kind: [] for kind in GrantKind}
        for destination, result in zip(destinations, results, strict=True):
            by_kind[result.kind].append(destination.popped)
            if result.kind is GrantKind.FENCED:
                destination.session.is_ready = False
        for kind, settle in (
            (GrantKind.GRANTED, self._queue.ack_many),
            (GrantKind.NOT_QUEUED, self._queue.drop_many),
            (GrantKind.FENCED, self._queue.return_many),
        ):
            if by_kind[kind]:
                await settle(by_kind[kind])


def _at_most(number: int, by_class: ByClass) -> ByClass:
    interactive, standard, batch = (min(number, each) for each in by_class)
    return interactive, standard, batch
