"""Worker sessions in memory."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from service_kit.ids import SessionId
from state_store.memory.data import MemoryPart
from state_store.model import GenerationRecord, GenerationSummary, NewSession, SessionRecord, SessionState, State
from state_store.ports import LostSession, OpenedSession, OpenKind, Renewal


class MemorySessions(MemoryPart):
    """SessionStore."""

    async def open_session(
        self, session: NewSession, *, lease: timedelta, now: datetime | None = None
    ) -> OpenedSession:
        known = self._data.sessions.get(session.session_id)
        if known is not None and known.state is not SessionState.LIVE:
            return OpenedSession(kind=OpenKind.OVER, owner_epoch=known.owner_epoch, running=())
        expires_at = self._at(now) + lease
        if known is None and (other := self._other_kv_dtype(session)) is not None:
            return OpenedSession(kind=OpenKind.DIFFERS, owner_epoch=0, running=(), kv_dtype=other)
        if known is None:
            opened = _registered(session, expires_at)
        else:
            opened = replace(
                known,
                owner_epoch=known.owner_epoch + 1,
                scheduler_id=session.scheduler_id,
                address=session.address,
                kv_dtype=session.kv_dtype,
                lease_expires_at=expires_at,
            )
        self._data.sessions[session.session_id] = opened
        running = tuple(self._running_of(session.session_id))
        return OpenedSession(kind=OpenKind.OPENED, owner_epoch=opened.owner_epoch, running=running)

    def _other_kv_dtype(self, session: NewSession) -> str | None:
        for _, other in sorted(self._data.sessions.items()):
            is_peer = other.state is SessionState.LIVE and other.model_key == session.model_key
            if is_peer and "" not in (other.kv_dtype, session.kv_dtype) and other.kv_dtype != session.kv_dtype:
                return other.kv_dtype
        return None

    async def renew_many(
        self, items: Sequence[Renewal], *, lease: timedelta, now: datetime | None = None
    ) -> list[bool]:
        return [self._renew(item, self._at(now) - item.heard_ago + lease) for item in items]

    def _renew(self, item: Renewal, expires_at: datetime) -> bool:
        session = self._owned(item.session_id, item.owner_epoch)
        if session is None:
            return False
        expires_at = max(session.lease_expires_at, expires_at)
        self._data.sessions[item.session_id] = replace(session, lease_expires_at=expires_at)
        return True

    async def lose_session(
        self, session_id: SessionId, owner_epoch: int, *, now: datetime | None = None
    ) -> LostSession | None:
        session = self._owned(session_id, owner_epoch)
        return self._lose(session, self._at(now)) if session is not None else None

    async def lose_expired(self, *, limit: int, now: datetime | None = None) -> list[LostSession]:
        at = self._at(now)
        over = [
            session
            for _, session in sorted(self._data.sessions.items())
            if session.state is SessionState.LIVE and session.lease_expires_at < at
        ]
        return [self._lose(session, at) for session in over[:limit]]

    async def lose_older(
        self, session_id: SessionId, owner_epoch: int, *, now: datetime | None = None
    ) -> list[LostSession]:
        own = self._owned(session_id, owner_epoch)
        if own is None:
            return []
        older = [
            session
            for _, session in sorted(self._data.sessions.items())
            if session.state is SessionState.LIVE
            and (session.worker_id, session.address) == (own.worker_id, own.address)
            and session.session_id < session_id
        ]
        return [self._lose(session, self._at(now)) for session in older]

    def _lose(self, session: SessionRecord, now: datetime) -> LostSession:
        self._data.sessions[session.session_id] = replace(session, state=SessionState.LOST)
        outcomes = [self._requeue_or_leave(record, now) for record in self._running_of(session.session_id)]
        return LostSession(
            session_id=session.session_id,
            requeued=tuple(record for record, is_requeued in outcomes if is_requeued),
            to_end=tuple(record for record, is_requeued in outcomes if not is_requeued),
        )

    async def end_session(self, session_id: SessionId, owner_epoch: int) -> bool:
        session = self._owned(session_id, owner_epoch)
        if session is None or self._running_of(session_id):
            return False
        self._data.sessions[session_id] = replace(session, state=SessionState.ENDED)
        return True

    async def running_of(self, session_ids: Sequence[SessionId]) -> list[GenerationSummary]:
        return [
            GenerationSummary.of(record)
            for record in self._by_id()
            if record.state is State.RUNNING and record.session_id in session_ids
        ]

    async def orphans(self, *, limit: int) -> list[GenerationRecord]:
        found = [
            record
            for record in self._by_id()
            if record.state is State.RUNNING
            and record.session_id is not None
            and self._data.sessions[record.session_id].state is not SessionState.LIVE
        ]
        return found[:limit]

    async def list_sessions(self, *, include_over: bool = False) -> list[SessionRecord]:
        return [
            session
            for _, session in sorted(self._data.sessions.items())
            if include_over or session.state is SessionState.LIVE
        ]

    def _owned(self, session_id: SessionId, owner_epoch: int) -> SessionRecord | None:
        session = self._data.sessions.get(session_id)
        if session is None or session.state is not SessionState.LIVE or session.owner_epoch != owner_epoch:
            return None
        return session


def _registered(session: NewSession, expires_at: datetime) -> SessionRecord:
    return SessionRecord(
        session_id=session.session_id,
        worker_id=session.worker_id,
        address=session.address,
        scheduler_id=session.scheduler_id,
        owner_epoch=1,
        state=SessionState.LIVE,
        model=session.model,
        model_key=session.model_key,
        context_length=session.context_length,
        num_blocks=session.num_blocks,
        block_size=session.block_size,
        max_running=session.max_running,
        kv_dtype=session.kv_dtype,
        lease_expires_at=expires_at,
    )
