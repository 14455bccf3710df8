"""Locks end: those of a paused process by themselves, and those of batches in any order without a deadlock."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

import psycopg
import pytest
from psycopg import errors

from service_kit.ids import GenerationId
from state_store.errors import StoreUnavailableError
from state_store.model import AttemptOutcome, CancelCause, State
from state_store.ports import AttemptEnd, AttemptRef, Renewal
from state_store.postgres import pool, statements
from state_store.postgres.attempts import lock_generations
from state_store.postgres.pool import PoolSettings, Transaction
from state_store.postgres.store import PostgresStore
from tests.support.generations import LEASE, finish_of, grant_request, new_generation, new_session, opened, submitted

T = TypeVar("T")


async def pause_idle(transaction: Transaction, generation_id: GenerationId) -> None:
    """Between two statements."""
    await lock_generations(transaction, [generation_id])


async def pause_before_sync(transaction: Transaction, generation_id: GenerationId) -> None:
    """Between a statement and its Sync: Postgres executes it, and does not count the process as idle."""
    connection = transaction._connection
    await connection.execute(statements.LOCK_GENERATIONS, {"generation_ids": [generation_id]})
    connection.pgconn.send_flush_request()
    connection.pgconn.flush()


@pytest.mark.parametrize("lock", [pause_idle, pause_before_sync])
async def test_the_locks_of_a_paused_process_are_dropped(
    store_dsn: str, lock: Callable[[Transaction, GenerationId], Awaitable[None]]
) -> None:
    soon = timedelta(milliseconds=300)
    settings = PoolSettings(idle_timeout=soon, transaction_timeout=soon, lock_timeout=timedelta(seconds=4))
    paused = PostgresStore(store_dsn, settings=settings)
    other = PostgresStore(store_dsn, settings=PoolSettings(lock_timeout=timedelta(seconds=4)))
    await paused.open()
    await other.open()
    record = await submitted(other)
    has_locked, wakes_up = asyncio.Event(), asyncio.Event()

    async def pause(transaction: Transaction) -> None:
        await lock(transaction, record.generation_id)
        has_locked.set()
        await wakes_up.wait()
        await lock_generations(transaction, [record.generation_id])

    task = asyncio.ensure_future(paused._database.transact(pause))
    await has_locked.wait()
    await _until_locked(store_dsn)
    [cancelled] = await other.request_cancel_many([(record.generation_id, CancelCause.CLIENT)])
    assert cancelled is not None
    assert cancelled.cancel_cause is CancelCause.CLIENT
    wakes_up.set()
    with pytest.raises(StoreUnavailableError):
        await task
    await paused.close()
    await other.close()


async def _until_locked(dsn: str) -> None:
    """Waits until somebody holds locks on generations' rows."""
    query = (
        "SELECT count(*) FROM pg_locks JOIN pg_class ON relation = pg_class.oid"
        " WHERE relname LIKE 'generations%%' AND mode = 'RowShareLock' AND granted"
    )
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        async with asyncio.timeout(5):
            while True:
                cursor = await connection.execute(query)
                row = await cursor.fetchone()
                if row is not None and row[0]:
                    return


async def test_batches_in_any_order_do_not_deadlock(store_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_RETRYABLE", (errors.SerializationFailure, errors.UniqueViolation))
    store = PostgresStore(store_dsn, settings=PoolSettings(max_size=12))
    await store.open()
    sessions = [await opened(store) for _ in range(4)]
    numbers = random.Random(7)

    def shuffled(items: Iterable[T]) -> list[T]:
        listed = list(items)
        return numbers.sample(listed, k=len(listed))

    for turn in range(12):
        records = [await submitted(store) for _ in range(8)]
        ids = [record.generation_id for record in records]

        duplicates = [new_generation(request_id=record.request_id) for record in records]
        grants = [grant_request(record, sessions[index % 4]) for index, record in enumerate(records)]
        await store.grant_many(grants[:4])
        refs = [AttemptRef(generation_id=generation_id, attempt=1) for generation_id in ids]
        ends = [
            AttemptEnd(
                generation_id=generation_id,
                attempt=1,
                outcome=AttemptOutcome.SESSION_LOST,
                end_position=0,
                is_charged=True,
            )
            for generation_id in ids
        ]
        finishes = [replace(finish_of(record), from_state=State.RUNNING, attempt=1) for record in records]
        calls = [
            *(store.submit_many(shuffled(duplicates)) for _ in range(2)),
            *(store.grant_many(shuffled(grants)) for _ in range(2)),
            *(store.finish_many(shuffled(finishes)[:6]) for _ in range(2)),
            store.requeue_many(shuffled(refs)),
            store.record_attempt_ends(shuffled(ends)),
            store.request_cancel_many([(generation_id, CancelCause.CLIENT) for generation_id in shuffled(ids)]),
            store.renew_many(
                [Renewal(session_id=session_id, owner_epoch=1) for session_id in shuffled(sessions)], lease=LEASE
            ),
            store.open_session(new_session(session_id=sessions[turn % 4]), lease=LEASE),
            store.lose_session(sessions[turn % 4], 1 + turn // 4),
            store.lose_older(sessions[turn % 4], 1 + turn // 4),
            store.lose_expired(limit=2),
        ]
        await asyncio.gather(*shuffled(calls))
        sessions = [record.session_id for record in await store.list_sessions()]
        sessions += [await opened(store) for _ in range(4 - len(sessions))]
    await store.close()
