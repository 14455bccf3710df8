"""The worker sessions that this scheduler owns: taking them, keeping their leases, losing them."""

import asyncio
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial

from scheduler.attempt_table import Overdue
from scheduler.recovery import Recovery
from scheduler.retry import until_available
from scheduler.worker_session import SessionExit, WorkerSession
from service_kit.errors import AbortedError, WorkerDiffersError
from service_kit.ids import SessionId
from service_kit.logging import get_logger
from state_store.model import AttemptOutcome, GenerationRecord, NewSession
from state_store.ports import AttemptRef, OpenKind, Renewal, Store

_log = get_logger()


class SessionRegistry:
    """Owner of the sessions' tasks. A session is here under exactly one owner_epoch."""

    def __init__(
        self,
        *,
        store: Store,
        recovery: Recovery,
        make_session: Callable[[NewSession, int], WorkerSession],
        clock: Callable[[], float],
        lease: timedelta,
    ) -> None:
        self._store = store
        self._recovery = recovery
        self._make_session = make_session
        self._clock = clock
        self._lease = lease
        self._sessions: dict[SessionId, tuple[WorkerSession, asyncio.Task[None]]] = {}
        self._unclaimed: set[AttemptRef] = set()

    def ready(self) -> list[WorkerSession]:
        """Sessions that can take work, those with the fewest attempts first."""
        sessions = [session for session, _ in self._sessions.values() if session.is_ready]
        return sorted(sessions, key=lambda session: len(session.table))

    def __len__(self) -> int:
        return len(self._sessions)

    async def announce(self, new: NewSession) -> int:
        """Takes the session over and starts to talk to its worker; returns the owner_epoch. Raises AbortedError when the
        session is over: the worker must come back as a new one; WorkerDiffersError when other live workers of the model
        store keys and values as another type: a stream that went from one to the other would not continue with the same
        bits."""
        opened = await self._store.open_session(new, lease=self._lease)
        if opened.kind is OpenKind.OVER:
            raise AbortedError("the session is over; announce a new one", metadata={"session_id": new.session_id})
        if opened.kind is OpenKind.DIFFERS:
            raise WorkerDiffersError(
                "capabilities.kv_dtype",
                f"is {new.kv_dtype}, live workers of {new.model} have {opened.kv_dtype}",
                metadata={"session_id": new.session_id},
            )
        await self._drop(new.session_id)
        session = self._make_session(new, opened.owner_epoch)
        for record in opened.running:
            session.expect(record)
        self._sessions[new.session_id] = (session, asyncio.create_task(self._run(session)))
        _log.info(
            "session_opened",
            session_id=new.session_id,
            worker_id=new.worker_id,
            kv_dtype=new.kv_dtype,
            owner_epoch=opened.owner_epoch,
            running=len(opened.running),
        )
        return opened.owner_epoch

    async def _run(self, session: WorkerSession) -> None:
        replacing = asyncio.create_task(self._lose_older(session))
        replacing.add_done_callback(partial(_log_failure, session_id=session.session.session_id))
        try:
            exit_ = await session.run()
        finally:
            replacing.cancel()  # a recovery that this cuts short is the reaper's
        if self._sessions.get(session.session.session_id, (None, None))[0] is session:
            del self._sessions[session.session.session_id]
        session_id, owner_epoch = session.session.session_id, session.owner_epoch
        if exit_ is SessionExit.DRAINED and await until_available(
            lambda: self._store.end_session(session_id, owner_epoch)
        ):
            _log.info("session_drained", session_id=session_id)
            return
        # Refused under our epoch when another scheduler took it over: then it is not ours to lose.
        lost = await until_available(lambda: self._store.lose_session(session_id, owner_epoch))
        if lost is None:
            _log.info("session_left_to_its_owner", session_id=session_id)
            return
        outcome = AttemptOutcome.HANDED_BACK if exit_ is SessionExit.DRAINED else AttemptOutcome.SESSION_LOST
        await until_available(lambda: self._recovery.recover_session(lost, outcome=outcome, untried=session.untried))

    async def _lose_older(self, session: WorkerSession) -> None:
        """A worker that was killed and started again: its earlier sessions need not wait for the end of their leases.

        That a worker announces itself is no proof: one that is cut off, and whose address belongs to another process by
        now, announces itself as well. That it answers at its address is.
        """
        await session.greeted.wait()
        for lost in await until_available(
            lambda: self._store.lose_older(session.session.session_id, session.owner_epoch)
        ):
            known = self._sessions.get(lost.session_id)
            untried = known[0].untried if known is not None else None
            await self._drop(lost.session_id)
            await until_available(partial(self._recovery.recover_session, lost, untried=untried))

    async def _drop(self, session_id: SessionId) -> None:
        """Hangs up without losing the session: somebody newer owns it."""
        known = self._sessions.pop(session_id, None)
        if known is not None:
            known[1].cancel()
            await asyncio.gather(known[1], return_exceptions=True)

    def cancel_attempt(self, record: GenerationRecord) -> bool:
        """Tells the worker of a running row, if its session is owned here; False where it is not."""
        if record.session_id is None or record.session_id not in self._sessions:
            return False
        session, _ = self._sessions[record.session_id]
        session.cancel(AttemptRef(generation_id=record.generation_id, attempt=record.attempt))
        return True

    async def renew_once(self) -> None:
        """Keeps the sessions whose worker speaks; hangs up on those that are no longer ours. A lease counts from the
        worker's last word, so that a worker that is silent for a whole lease loses it by the database's clock."""
        sessions = [session for session, _ in self._sessions.values()]
        if not sessions:
            return
        now_s = self._clock()
        renewals = [
            Renewal(
                session_id=session.session.session_id,
                owner_epoch=session.owner_epoch,
                heard_ago=timedelta(seconds=now_s - session.last_heard_s),
            )
            for session in sessions
        ]
        renewed = await self._store.renew_many(renewals, lease=self._lease)
        for session, is_renewed in zip(sessions, renewed, strict=True):
            known = self._sessions.get(session.session.session_id)
            if not is_renewed and known is not None and known[0] is session:
                _log.warning("session_deposed", session_id=session.session.session_id)
                await self._drop(session.session.session_id)

    async def compare_once(self) -> None:
        """Compares the sessions with Postgres: adopts grants this process forgot (an ambiguous commit), passes on
        cancels that were recorded elsewhere, gives back what a worker did not name after a second assignment."""
        sessions = {session.session.session_id: session for session, _ in self._sessions.values()}
        unclaimed: set[AttemptRef] = set()
        for row in await self._store.running_of(list(sessions)):
            assert row.session_id is not None
            session = sessions[row.session_id]
            ref = AttemptRef(generation_id=row.generation_id, attempt=row.attempt)
            if session.table.find(ref) is None and not session.is_ending(ref):
                unclaimed.add(ref)
            if row.cancel_cause is not None:
                session.cancel(ref)
        # Seen once it may be a grant or an end that is just being dealt with.
        await self._adopt(unclaimed & self._unclaimed, sessions)
        self._unclaimed = unclaimed
        for session in sessions.values():
            overdue = [
                attempt.ref
                for attempt, what in session.table.overdue(self._clock())
                if what is Overdue.LOSE and session.is_ready
            ]
            if overdue:
                _log.warning("assignments_lost", session_id=session.session.session_id, count=len(overdue))
                await self._recovery.give_back(overdue, AttemptOutcome.ASSIGNMENT_LOST)
                for ref in overdue:
                    session.table.forget(ref)

    async def _adopt(self, refs: set[AttemptRef], sessions: Mapping[SessionId, WorkerSession]) -> None:
        """Expects attempts that these sessions run in Postgres and that nobody expects here."""
        if not refs:
            return
        for record in await self._store.get_many([ref.generation_id for ref in refs]):
            session = sessions.get(record.session_id) if record is not None and record.session_id is not None else None
            if record is None or session is None:
                continue
            ref = AttemptRef(generation_id=record.generation_id, attempt=record.attempt)
            if ref in refs and not session.is_ending(ref):
                session.expect(record)

    async def forget_over(self, session_ids: list[SessionId]) -> None:
        """Hangs up on sessions that a reaper has declared lost."""
        for session_id in session_ids:
            await self._drop(session_id)

    async def stop(self) -> None:
        """Hangs up on all; their leases let another scheduler, or the reaper, take over."""
        for session_id in list(self._sessions):
            await self._drop(session_id)


def _log_failure(task: asyncio.Task[None], *, session_id: SessionId) -> None:
    """What went wrong beside a session is told at once, not when somebody waits for it: nobody does. The reaper loses what
    was left."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("older_sessions_not_lost", session_id=session_id, exc_info=error)
