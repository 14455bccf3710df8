"""Worker sessions. Takeover and loss write the session row first: that waits for grants that hold it, and later grants
see it. Only then, with a new snapshot, are the session's attempts read."""

import time
from collections.abc import Sequence
from datetime import datetime, timedelta

from service_kit.ids import GenerationId, SessionId
from state_store.decisions import is_grantable
from state_store.errors import StoreUnavailableError
from state_store.model import GenerationRecord, GenerationSummary, NewSession, SessionRecord
from state_store.ports import LostSession, OpenedSession, OpenKind, Renewal
from state_store.postgres import rows, statements
from state_store.postgres.attempts import get_records, requeue
from state_store.postgres.pool import PostgresPart, Transaction

_OPEN = """
INSERT INTO worker_sessions AS s (
    session_id, worker_id, address, scheduler_id, owner_epoch, state, model, model_revision, model_precision,
    context_length, num_blocks, block_size, max_running, kv_dtype, lease_expires_at
) VALUES (
    %(session_id)s, %(worker_id)s, %(address)s, %(scheduler_id)s, 1, 'LIVE', %(model)s, %(revision)s, %(precision)s,
    %(context_length)s, %(num_blocks)s, %(block_size)s, %(max_running)s, %(kv_dtype)s,
    coalesce(%(now)s::timestamptz, now()) + %(lease)s::interval
)
ON CONFLICT (session_id) DO UPDATE
    SET owner_epoch = s.owner_epoch + 1, scheduler_id = excluded.scheduler_id, address = excluded.address,
        kv_dtype = excluded.kv_dtype, lease_expires_at = excluded.lease_expires_at
    WHERE s.state = 'LIVE'
RETURNING owner_epoch
"""
# Until the end of the transaction, so that the next one sees the session it registers.
_LOCK_MODEL = "SELECT pg_advisory_xact_lock(hashtextextended(%(revision)s || ' ' || %(precision)s, 0))"
_OTHER_KV_DTYPE = """
SELECT other.kv_dtype FROM worker_sessions other
WHERE other.state = 'LIVE' AND other.model_revision = %(revision)s AND other.model_precision = %(precision)s
    AND other.kv_dtype NOT IN ('', %(kv_dtype)s)
    AND NOT EXISTS (SELECT FROM worker_sessions own WHERE own.session_id = %(session_id)s)
ORDER BY other.session_id LIMIT 1
"""
_EPOCH_OF = "SELECT owner_epoch FROM worker_sessions WHERE session_id = %(session_id)s"
_RENEW = """
WITH held AS MATERIALIZED (
    SELECT s.session_id, i.heard_ago FROM worker_sessions s
    JOIN unnest(%(session_ids)s::text[], %(owner_epochs)s::bigint[], %(heard_ago)s::interval[])
            AS i (session_id, owner_epoch, heard_ago)
        ON s.session_id = i.session_id AND s.owner_epoch = i.owner_epoch
    WHERE s.state = 'LIVE' ORDER BY s.session_id FOR NO KEY UPDATE OF s
)
UPDATE worker_sessions s SET lease_expires_at =
    greatest(s.lease_expires_at, coalesce(%(now)s::timestamptz, now()) - held.heard_ago + %(lease)s::interval)
FROM held WHERE s.session_id = held.session_id
RETURNING s.session_id, s.owner_epoch
"""
_LOSE = """
UPDATE worker_sessions SET state = 'LOST'
WHERE session_id = %(session_id)s AND owner_epoch = %(owner_epoch)s AND state = 'LIVE' RETURNING session_id
"""
_LOSE_EXPIRED = """
WITH over AS MATERIALIZED (
    SELECT session_id FROM worker_sessions
    WHERE state = 'LIVE' AND lease_expires_at < coalesce(%(now)s::timestamptz, now())
    ORDER BY session_id LIMIT %(limit)s FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE worker_sessions s SET state = 'LOST' FROM over WHERE s.session_id = over.session_id RETURNING s.session_id
"""
_LOSE_OLDER = """
WITH older AS MATERIALIZED (
    SELECT old.session_id FROM worker_sessions own
    JOIN worker_sessions old
        ON old.worker_id = own.worker_id AND old.address = own.address AND old.session_id < own.session_id
    WHERE own.session_id = %(session_id)s AND own.owner_epoch = %(owner_epoch)s AND own.state = 'LIVE'
        AND old.state = 'LIVE'
    ORDER BY old.session_id FOR NO KEY UPDATE OF old
)
UPDATE worker_sessions s SET state = 'LOST' FROM older WHERE s.session_id = older.session_id RETURNING s.session_id
"""
_HOLD = """
SELECT session_id FROM worker_sessions
WHERE session_id = %(session_id)s AND owner_epoch = %(owner_epoch)s AND state = 'LIVE' FOR NO KEY UPDATE
"""
_END = """
UPDATE worker_sessions s SET state = 'ENDED'
WHERE s.session_id = %(session_id)s
    AND NOT EXISTS (SELECT FROM generations g WHERE g.state = 'RUNNING' AND g.session_id = s.session_id)
RETURNING s.session_id
"""
_LIST = """
SELECT session_id, worker_id, address, scheduler_id, owner_epoch, state, model, model_revision, model_precision,
    context_length, num_blocks, block_size, max_running, kv_dtype, lease_expires_at
FROM worker_sessions WHERE state = 'LIVE' OR %(include_over)s ORDER BY session_id
"""
_MAX_STANDSTILL_S = 1.0


class PostgresSessions(PostgresPart):
    """SessionStore."""

    async def open_session(
        self, session: NewSession, *, lease: timedelta, now: datetime | None = None
    ) -> OpenedSession:
        async def work(transaction: Transaction) -> OpenedSession:
            if (other := await _other_kv_dtype(transaction, session)) is not None:
                return OpenedSession(kind=OpenKind.DIFFERS, owner_epoch=0, running=(), kv_dtype=other)
            opened = await transaction.fetch(_OPEN, {**_columns(session), "lease": lease, "now": now})
            if not opened:
                [over] = await transaction.fetch(_EPOCH_OF, {"session_id": session.session_id})
                return OpenedSession(kind=OpenKind.OVER, owner_epoch=over["owner_epoch"], running=())
            found = await transaction.fetch(statements.RUNNING_OF_SESSIONS, {"session_ids": [session.session_id]})
            running = tuple(rows.generation(row) for row in found)
            return OpenedSession(kind=OpenKind.OPENED, owner_epoch=opened[0]["owner_epoch"], running=running)

        return await self._database.transact(work)

    async def renew_many(
        self, items: Sequence[Renewal], *, lease: timedelta, now: datetime | None = None
    ) -> list[bool]:
        parameters = {
            "session_ids": [item.session_id for item in items],
            "owner_epochs": [item.owner_epoch for item in items],
            "heard_ago": [item.heard_ago for item in items],
            "lease": lease,
            "now": now,
        }
        found = await self._database.fetch(_RENEW, parameters) if items else []
        renewed = {(row["session_id"], row["owner_epoch"]) for row in found}
        return [(item.session_id, item.owner_epoch) in renewed for item in items]

    async def lose_session(
        self, session_id: SessionId, owner_epoch: int, *, now: datetime | None = None
    ) -> LostSession | None:
        async def work(transaction: Transaction) -> list[LostSession]:
            found = await transaction.fetch(_LOSE, {"session_id": session_id, "owner_epoch": owner_epoch})
            return await _give_up_attempts(transaction, [row["session_id"] for row in found], now)

        lost = await self._database.transact(work)
        return lost[0] if lost else None

    async def lose_expired(self, *, limit: int, now: datetime | None = None) -> list[LostSession]:
        asked_s = time.monotonic()

        async def work(transaction: Transaction) -> list[LostSession]:
            found = await transaction.fetch(_LOSE_EXPIRED, {"limit": limit, "now": now})
            if found and time.monotonic() - asked_s > _MAX_STANDSTILL_S:
                # Postgres stood still between the question and its answer, as did all renewals: undone.
                raise StoreUnavailableError("Postgres stood still: whose lease is over is not known")
            return await _give_up_attempts(transaction, [row["session_id"] for row in found], now)

        return await self._database.transact(work)

    async def lose_older(
        self, session_id: SessionId, owner_epoch: int, *, now: datetime | None = None
    ) -> list[LostSession]:
        async def work(transaction: Transaction) -> list[LostSession]:
            own = {"session_id": session_id, "owner_epoch": owner_epoch}
            found = await transaction.fetch(_LOSE_OLDER, own)
            return await _give_up_attempts(transaction, [row["session_id"] for row in found], now)

        return await self._database.transact(work)

    async def end_session(self, session_id: SessionId, owner_epoch: int) -> bool:
        async def work(transaction: Transaction) -> bool:
            own = {"session_id": session_id, "owner_epoch": owner_epoch}
            if not await transaction.fetch(_HOLD, own):
                return False
            return bool(await transaction.fetch(_END, own))

        return await self._database.transact(work)

    async def running_of(self, session_ids: Sequence[SessionId]) -> list[GenerationSummary]:
        found = await self._database.fetch(statements.RUNNING_SUMMARIES, {"session_ids": list(session_ids)})
        return [rows.summary(row) for row in found]

    async def orphans(self, *, limit: int) -> list[GenerationRecord]:
        return [rows.generation(row) for row in await self._database.fetch(statements.ORPHANS, {"limit": limit})]

    async def list_sessions(self, *, include_over: bool = False) -> list[SessionRecord]:
        return [rows.session(row) for row in await self._database.fetch(_LIST, {"include_over": include_over})]


async def _other_kv_dtype(transaction: Transaction, session: NewSession) -> str | None:
    """That a LIVE session of the same model has, unless it is the session's own or the session is known already."""
    if not session.kv_dtype:
        return None
    await transaction.fetch(_LOCK_MODEL, _columns(session))
    found = await transaction.fetch(_OTHER_KV_DTYPE, _columns(session))
    return found[0]["kv_dtype"] if found else None


async def _give_up_attempts(
    transaction: Transaction, session_ids: Sequence[SessionId], now: datetime | None
) -> list[LostSession]:
    """Requeues what may run again; the rest stays RUNNING until its log is sealed and it is finished."""
    if not session_ids:
        return []
    found = await transaction.fetch(statements.LOCK_RUNNING_OF_SESSIONS, {"session_ids": list(session_ids)})
    owners: dict[GenerationId, SessionId] = {}
    requeued_ids: list[GenerationId] = []
    to_end_ids: list[GenerationId] = []
    for row in found:
        generation_id = GenerationId(str(row["generation_id"]))
        owners[generation_id] = row["session_id"]
        (requeued_ids if is_grantable(rows.locked_generation(row)) else to_end_ids).append(generation_id)
    requeued = await requeue(transaction, requeued_ids, now)
    to_end = await get_records(transaction, to_end_ids)
    return [
        LostSession(
            session_id=session_id,
            requeued=tuple(requeued[key] for key in sorted(requeued) if owners[key] == session_id),
            to_end=tuple(to_end[key] for key in sorted(to_end) if owners[key] == session_id),
        )
        for session_id in sorted(session_ids)
    ]


def _columns(session: NewSession) -> dict[str, object]:
    return {
        "session_id": session.session_id,
        "worker_id": session.worker_id,
        "address": session.address,
        "scheduler_id": session.scheduler_id,
        "model": session.model,
        "revision": session.model_key.revision,
        "precision": session.model_key.precision,
        "context_length": session.context_length,
        "num_blocks": session.num_blocks,
        "block_size": session.block_size,
        "max_running": session.max_running,
        "kv_dtype": session.kv_dtype,
    }
