"""Attempts: grant, requeue, ends and cancel wishes. Each method locks its rows, decides, and writes what it decided."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime

from service_kit.ids import GenerationId, SessionId, is_generation_id
from state_store.decisions import decide_grant, decide_requeue
from state_store.model import CancelCause, GenerationRecord, State
from state_store.ports import (
    AttemptEnd,
    AttemptRef,
    GrantKind,
    GrantRequest,
    GrantResult,
    RequeueKind,
    RequeueResult,
)
from state_store.postgres import rows, statements
from state_store.postgres.pool import PostgresPart, Transaction
from state_store.postgres.rows import LockedGeneration, LockedSession, to_signed

Records = dict[GenerationId, GenerationRecord]


def known_ids(generation_ids: Iterable[GenerationId]) -> list[GenerationId]:
    """Each id once, without those that no generation can have."""
    return sorted({generation_id for generation_id in generation_ids if is_generation_id(generation_id)})


def by_id(found: Iterable[rows.Row]) -> Records:
    records = map(rows.generation, found)
    return {record.generation_id: record for record in records}


async def lock_generations(
    transaction: Transaction, generation_ids: Iterable[GenerationId]
) -> dict[GenerationId, LockedGeneration]:
    parameters = {"generation_ids": known_ids(generation_ids)}
    found = await transaction.fetch(statements.LOCK_GENERATIONS, parameters)
    return {GenerationId(str(row["generation_id"])): rows.locked_generation(row) for row in found}


async def get_records(transaction: Transaction, generation_ids: Iterable[GenerationId]) -> Records:
    ids = known_ids(generation_ids)
    if not ids:
        return {}
    found = await transaction.fetch(statements.GET, {"generation_ids": ids})
    return by_id(found)


async def requeue(transaction: Transaction, generation_ids: Sequence[GenerationId], now: datetime | None) -> Records:
    """Requeues locked RUNNING rows and ends their attempts, whose outcome stays open until recovery looked into it."""
    if not generation_ids:
        return {}
    found = await transaction.fetch(statements.REQUEUE, {"generation_ids": list(generation_ids), "now": now})
    return by_id(found)


class PostgresAttempts(PostgresPart):
    """The part of GenerationStore between submit and finish."""

    async def grant_many(self, items: Sequence[GrantRequest], *, now: datetime | None = None) -> list[GrantResult]:
        async def work(transaction: Transaction) -> list[GrantResult]:
            sessions = await _lock_sessions(transaction, {item.session_id for item in items})
            heads = await lock_generations(transaction, (item.generation_id for item in items))
            kinds = []
            granted: list[tuple[GrantRequest, LockedSession]] = []
            for item in items:
                head, session = heads.get(item.generation_id), sessions.get(item.session_id)
                kinds.append(decide_grant(item, head, session))
                if kinds[-1] is GrantKind.GRANTED and head is not None and session is not None:
                    granted.append((item, session))
                    heads[item.generation_id] = replace(head, state=State.RUNNING)
            records = await _grant(transaction, granted, now)
            return [
                GrantResult(kind=kind, record=records[item.generation_id] if kind is GrantKind.GRANTED else None)
                for item, kind in zip(items, kinds, strict=True)
            ]

        return await self._database.transact(work) if items else []

    async def requeue_many(self, items: Sequence[AttemptRef], *, now: datetime | None = None) -> list[RequeueResult]:
        async def work(transaction: Transaction) -> list[RequeueResult]:
            heads = await lock_generations(transaction, (item.generation_id for item in items))
            kinds = []
            for item in items:
                head = heads.get(item.generation_id)
                kinds.append(decide_requeue(item.attempt, head))
                if kinds[-1] is RequeueKind.REQUEUED and head is not None:
                    heads[item.generation_id] = replace(head, state=State.QUEUED)
            paired = list(zip(items, kinds, strict=True))
            records = await requeue(
                transaction, [item.generation_id for item, kind in paired if kind is RequeueKind.REQUEUED], now
            )
            records |= await get_records(
                transaction, [item.generation_id for item, kind in paired if kind is RequeueKind.TO_END]
            )
            return [
                RequeueResult(kind=kind, record=None if kind is RequeueKind.STALE else records[item.generation_id])
                for item, kind in paired
            ]

        return await self._database.transact(work) if items else []

    async def record_attempt_ends(self, items: Sequence[AttemptEnd], *, now: datetime | None = None) -> list[bool]:
        firsts: dict[tuple[GenerationId, int], AttemptEnd] = {}
        for item in items:
            if is_generation_id(item.generation_id):
                firsts.setdefault((item.generation_id, item.attempt), item)

        async def work(transaction: Transaction) -> set[tuple[str, int]]:
            await lock_generations(transaction, (item.generation_id for item in items))
            found = await transaction.fetch(
                statements.RECORD_ATTEMPT_ENDS, {**_end_columns(list(firsts.values())), "now": now}
            )
            return {(str(row["generation_id"]), row["attempt"]) for row in found}

        written = await self._database.transact(work) if firsts else set()
        return [
            firsts.get((item.generation_id, item.attempt)) is item and (item.generation_id, item.attempt) in written
            for item in items
        ]

    async def request_cancel_many(
        self, items: Sequence[tuple[GenerationId, CancelCause]]
    ) -> list[GenerationRecord | None]:
        causes: dict[GenerationId, str] = {}
        for generation_id, cause in items:
            if is_generation_id(generation_id):
                causes.setdefault(generation_id, cause.value)

        async def work(transaction: Transaction) -> Records:
            await transaction.send(statements.LOCK_GENERATIONS, {"generation_ids": list(causes)})
            parameters = {"generation_ids": list(causes), "causes": list(causes.values())}
            await transaction.send(statements.REQUEST_CANCEL, parameters)
            return await get_records(transaction, causes)

        records = await self._database.transact(work) if causes else {}
        return [records.get(generation_id) for generation_id, _ in items]


async def _lock_sessions(transaction: Transaction, session_ids: set[SessionId]) -> dict[SessionId, LockedSession]:
    """Held FOR SHARE until the grant commits: takeover and loss update the row first, so they wait or are seen."""
    found = await transaction.fetch(statements.LOCK_SESSIONS_FOR_GRANT, {"session_ids": sorted(session_ids)})
    return {row["session_id"]: rows.locked_session(row) for row in found}


async def _grant(
    transaction: Transaction, granted: Sequence[tuple[GrantRequest, LockedSession]], now: datetime | None
) -> Records:
    if not granted:
        return {}
    parameters = {
        "generation_ids": [item.generation_id for item, _ in granted],
        "after_attempts": [item.after_attempt for item, _ in granted],
        "session_ids": [item.session_id for item, _ in granted],
        "worker_ids": [session.worker_id for _, session in granted],
        "nonces": [to_signed(item.nonce) for item, _ in granted],
        "now": now,
    }
    found = await transaction.fetch(statements.GRANT, parameters)
    return by_id(found)


def _end_columns(items: Sequence[AttemptEnd]) -> dict[str, list[object]]:
    return {
        "generation_ids": [item.generation_id for item in items],
        "attempts": [item.attempt for item in items],
        "outcomes": [item.outcome.value for item in items],
        "end_positions": [item.end_position for item in items],
        "charges": [item.is_charged for item in items],
    }
