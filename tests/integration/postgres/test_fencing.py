"""A grant races with a takeover or a loss: two connections, in both orders, each held open where it hurts."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import psycopg
import pytest

from service_kit.ids import SessionId
from state_store.model import SessionState, State
from state_store.ports import GrantKind
from state_store.postgres import statements
from state_store.postgres.store import PostgresStore
from tests.support.generations import LEASE, grant_request, new_session, state_of, submitted

T = TypeVar("T")
_WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


async def until_blocked(dsn: str, call: Awaitable[T]) -> "asyncio.Task[T]":
    """Starts the call and returns once its connection waits for a lock; fails when the call ends first."""
    task = asyncio.ensure_future(call)
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as watcher:
        async with asyncio.timeout(10):
            while await (await watcher.execute(_WAITING)).fetchone() == (0,):
                assert not task.done(), "the call did not wait for the lock"
                await asyncio.sleep(0.005)
    return task


async def hold_grant(connection: psycopg.AsyncConnection, session_id: SessionId, generation_id: str) -> None:
    """The statements of a grant, up to its commit."""
    await connection.execute(statements.LOCK_SESSIONS_FOR_GRANT, {"session_ids": [session_id]})
    await connection.execute(statements.LOCK_GENERATIONS, {"generation_ids": [generation_id]})
    parameters = {
        "generation_ids": [generation_id],
        "after_attempts": [0],
        "session_ids": [session_id],
        "worker_ids": ["worker-1"],
        "nonces": [1],
        "now": None,
    }
    await connection.execute(statements.GRANT, parameters)


@pytest.fixture
async def session_id(emptied_postgres_store: PostgresStore) -> SessionId:
    session = new_session()
    await emptied_postgres_store.open_session(session, lease=LEASE)
    return session.session_id


async def test_a_takeover_waits_for_a_grant_in_progress_and_hands_it_over(
    emptied_postgres_store: PostgresStore, store_admin: str, session_id: SessionId
) -> None:
    record = await submitted(emptied_postgres_store)
    async with await psycopg.AsyncConnection.connect(store_admin) as granting:
        await hold_grant(granting, session_id, record.generation_id)
        takeover = emptied_postgres_store.open_session(new_session(session_id=session_id), lease=LEASE)
        task = await until_blocked(store_admin, takeover)
        await granting.commit()
    taken = await task
    assert taken.owner_epoch == 2
    assert [row.generation_id for row in taken.running] == [record.generation_id]


async def test_a_loss_waits_for_a_grant_in_progress_and_requeues_it(
    emptied_postgres_store: PostgresStore, store_admin: str, session_id: SessionId
) -> None:
    record = await submitted(emptied_postgres_store)
    async with await psycopg.AsyncConnection.connect(store_admin) as granting:
        await hold_grant(granting, session_id, record.generation_id)
        task = await until_blocked(store_admin, emptied_postgres_store.lose_session(session_id, 1))
        await granting.commit()
    lost = await task
    assert lost is not None
    assert [(row.generation_id, row.state) for row in lost.requeued] == [(record.generation_id, State.QUEUED)]


async def test_a_replacement_waits_for_a_grant_in_progress_on_the_older_session_and_requeues_it(
    emptied_postgres_store: PostgresStore, store_admin: str, session_id: SessionId
) -> None:
    record = await submitted(emptied_postgres_store)
    newer = new_session()
    await emptied_postgres_store.open_session(newer, lease=LEASE)
    async with await psycopg.AsyncConnection.connect(store_admin) as granting:
        await hold_grant(granting, session_id, record.generation_id)
        task = await until_blocked(store_admin, emptied_postgres_store.lose_older(newer.session_id, 1))
        await granting.commit()
    [lost] = await task
    assert lost.session_id == session_id
    assert [(row.generation_id, row.state) for row in lost.requeued] == [(record.generation_id, State.QUEUED)]


async def test_an_end_of_the_session_waits_for_a_grant_in_progress_and_is_then_refused(
    emptied_postgres_store: PostgresStore, store_admin: str, session_id: SessionId
) -> None:
    record = await submitted(emptied_postgres_store)
    async with await psycopg.AsyncConnection.connect(store_admin) as granting:
        await hold_grant(granting, session_id, record.generation_id)
        task = await until_blocked(store_admin, emptied_postgres_store.end_session(session_id, 1))
        await granting.commit()
    assert not await task
    [session] = await emptied_postgres_store.list_sessions()
    assert session.state is SessionState.LIVE


async def test_expiry_passes_over_a_session_that_a_grant_holds(
    emptied_postgres_store: PostgresStore, store_admin: str, session_id: SessionId
) -> None:
    record = await submitted(emptied_postgres_store)
    async with await psycopg.AsyncConnection.connect(store_admin) as granting:
        await hold_grant(granting, session_id, record.generation_id)
        [session] = await emptied_postgres_store.list_sessions()
        late = session.lease_expires_at + LEASE
        assert await emptied_postgres_store.lose_expired(limit=5, now=late) == []
        await granting.commit()
    [lost] = await emptied_postgres_store.lose_expired(limit=5, now=late)
    assert [row.generation_id for row in lost.requeued] == [record.generation_id]


@pytest.mark.parametrize("change", ["owner_epoch = owner_epoch + 1", "state = 'LOST'", "state = 'ENDED'"])
async def test_a_grant_waits_for_a_takeover_or_loss_in_progress_and_is_then_fenced(
    emptied_postgres_store: PostgresStore, store_admin: str, session_id: SessionId, change: str
) -> None:
    record = await submitted(emptied_postgres_store)
    async with await psycopg.AsyncConnection.connect(store_admin) as deposing:
        await deposing.execute(f"UPDATE worker_sessions SET {change}")
        grant = emptied_postgres_store.grant_many([grant_request(record, session_id)])
        task = await until_blocked(store_admin, grant)
        await deposing.commit()
    assert [result.kind for result in await task] == [GrantKind.FENCED]
    assert await state_of(emptied_postgres_store, record) == record


async def test_a_grant_goes_on_when_the_takeover_it_waited_for_is_rolled_back(
    emptied_postgres_store: PostgresStore, store_admin: str, session_id: SessionId
) -> None:
    record = await submitted(emptied_postgres_store)
    async with await psycopg.AsyncConnection.connect(store_admin) as deposing:
        await deposing.execute("UPDATE worker_sessions SET owner_epoch = owner_epoch + 1")
        grant = emptied_postgres_store.grant_many([grant_request(record, session_id)])
        task = await until_blocked(store_admin, grant)
        await deposing.rollback()
    assert [result.kind for result in await task] == [GrantKind.GRANTED]
