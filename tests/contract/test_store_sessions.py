import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest

from service_kit.ids import SchedulerId, SessionId
from state_store.model import CancelCause, GenerationSummary, ModelKey, SessionState, State
from state_store.ports import GrantKind, OpenKind, Renewal
from tests.support.generations import (
    LEASE,
    NOW,
    Store,
    finish_of,
    grant_request,
    granted,
    new_session,
    opened,
    requeued,
    state_of,
    submitted,
)

OTHER_MODEL = ModelKey(revision="revision-2", precision="fp32")
OVER = NOW + LEASE + timedelta(milliseconds=1)


async def test_an_announced_session_is_live_under_epoch_one(store: Store) -> None:
    session = new_session()
    result = await store.open_session(session, lease=LEASE, now=NOW)
    assert (result.kind, result.owner_epoch, result.running) == (OpenKind.OPENED, 1, ())
    [record] = await store.list_sessions()
    assert (record.session_id, record.worker_id, record.state) == (session.session_id, "worker-1", SessionState.LIVE)
    assert (record.model_key, record.num_blocks, record.lease_expires_at) == (session.model_key, 100, NOW + LEASE)


@pytest.mark.parametrize(("first", "second"), [("float32", "float16"), ("float16", "float32")])
async def test_a_session_whose_keys_and_values_have_another_type_than_those_of_its_model_is_not_registered(
    store: Store, first: str, second: str
) -> None:
    live = await opened(store, kv_dtype=first)
    other = new_session(kv_dtype=second)
    result = await store.open_session(other, lease=LEASE, now=NOW)
    assert (result.kind, result.running, result.kv_dtype) == (OpenKind.DIFFERS, (), first)
    assert [record.session_id for record in await store.list_sessions(include_over=True)] == [live]
    # An equal one, one that does not say it, and one of another model are.
    for session in (new_session(kv_dtype=first), new_session(), new_session(kv_dtype=second, model_key=OTHER_MODEL)):
        assert (await store.open_session(session, lease=LEASE, now=NOW)).kind is OpenKind.OPENED
    assert sorted(record.kv_dtype for record in await store.list_sessions()) == sorted(["", first, first, second])


@pytest.mark.parametrize("is_drained", [True, False])
async def test_when_the_last_session_of_a_kv_type_is_over_another_type_is_registered_and_continues_its_work(
    store: Store, is_drained: bool
) -> None:
    old, new = await opened(store, kv_dtype="float32"), new_session(kv_dtype="float16")
    record = await granted(store, await submitted(store), old)
    assert (await store.open_session(new, lease=LEASE, now=NOW)).kind is OpenKind.DIFFERS
    if is_drained:
        await requeued(store, record)
        assert await store.end_session(old, 1)
    else:
        await store.lose_expired(limit=10, now=OVER)
    assert (await store.open_session(new, lease=LEASE, now=OVER)).kind is OpenKind.OPENED
    assert (await granted(store, await state_of(store, record), new.session_id)).attempt == 2


async def test_a_session_that_is_known_is_taken_over_whatever_its_kv_type(store: Store) -> None:
    # One that a scheduler opened which did not know of types; its worker says its type now.
    session = new_session()
    await store.open_session(session, lease=LEASE, now=NOW)
    await opened(store, kv_dtype="float32")
    taken = await store.open_session(replace(session, kv_dtype="float16"), lease=LEASE, now=NOW)
    assert (taken.kind, taken.owner_epoch) == (OpenKind.OPENED, 2)
    assert {record.kv_dtype for record in await store.list_sessions()} == {"float16", "float32"}


async def test_of_sessions_announced_at_the_same_moment_those_of_one_kv_type_only_are_registered(store: Store) -> None:
    sessions = [new_session(kv_dtype=kv_dtype) for kv_dtype in ("float32", "float16") * 6]
    await asyncio.gather(*(store.open_session(session, lease=LEASE, now=NOW) for session in sessions))
    found = [record.kv_dtype for record in await store.list_sessions()]
    assert (len(found), len(set(found))) == (6, 1)


async def test_a_takeover_raises_the_epoch_and_hands_over_what_runs(store: Store) -> None:
    session = new_session()
    await store.open_session(session, lease=LEASE, now=NOW)
    first = await granted(store, await submitted(store), session.session_id)
    second = await granted(store, await submitted(store), session.session_id)
    await store.finish_many([finish_of(first)])
    taker = replace(session, scheduler_id=SchedulerId("scheduler-2"), address="127.0.0.1:2")
    result = await store.open_session(taker, lease=LEASE, now=NOW + LEASE)
    assert (result.kind, result.owner_epoch, result.running) == (OpenKind.OPENED, 2, (second,))
    [record] = await store.list_sessions()
    assert (record.scheduler_id, record.address, record.owner_epoch) == ("scheduler-2", "127.0.0.1:2", 2)
    assert record.lease_expires_at == NOW + 2 * LEASE


async def test_a_repeated_announcement_to_the_same_scheduler_raises_the_epoch_too(store: Store) -> None:
    session = new_session()
    results = [await store.open_session(session, lease=LEASE) for _ in range(3)]
    assert [result.owner_epoch for result in results] == [1, 2, 3]


async def test_concurrent_takeovers_get_different_epochs(store: Store) -> None:
    session = new_session()
    results = await asyncio.gather(*(store.open_session(session, lease=LEASE) for _ in range(6)))
    assert sorted(result.owner_epoch for result in results) == [1, 2, 3, 4, 5, 6]


async def test_only_the_owner_renews_the_lease(store: Store) -> None:
    session = new_session()
    for _ in range(2):
        await store.open_session(session, lease=LEASE, now=NOW)
    lost, other = await opened(store), await opened(store)
    await store.lose_session(lost, 1)
    items = [(session.session_id, 1), (session.session_id, 2), (lost, 1), (SessionId("unknown"), 1), (other, 1)]
    renewals = [Renewal(session_id=session_id, owner_epoch=owner_epoch) for session_id, owner_epoch in items]
    assert await store.renew_many(renewals, lease=LEASE, now=OVER) == [False, True, False, False, True]
    leases = {record.session_id: record.lease_expires_at for record in await store.list_sessions()}
    assert leases == {session.session_id: OVER + LEASE, other: OVER + LEASE}


async def test_a_lease_counts_from_the_workers_last_word_and_is_never_shortened(store: Store) -> None:
    session_id = await opened(store)
    await store.renew_many([Renewal(session_id=session_id, owner_epoch=1)], lease=LEASE, now=NOW)
    [before] = await store.list_sessions()
    ago = timedelta(seconds=2)
    renewal = Renewal(session_id=session_id, owner_epoch=1, heard_ago=ago)
    long_ago = Renewal(session_id=session_id, owner_epoch=1, heard_ago=3 * LEASE)
    later = before.lease_expires_at
    assert await store.renew_many([renewal], lease=LEASE, now=later) == [True]
    assert await store.renew_many([long_ago], lease=LEASE, now=later) == [True]
    [after] = await store.list_sessions()
    assert after.lease_expires_at == later - ago + LEASE


async def test_a_worker_heard_again_at_its_address_replaces_its_older_sessions(store: Store) -> None:
    older, silent, newer = new_session(), new_session(), new_session()
    for session in (older, silent, newer):
        await store.open_session(session, lease=LEASE, now=NOW)
    records = [await granted(store, await submitted(store), older.session_id) for _ in range(2)]
    own = await granted(store, await submitted(store), newer.session_id)
    await store.request_cancel_many([(records[1].generation_id, CancelCause.CLIENT)])
    first, second = await store.lose_older(newer.session_id, 1, now=NOW)
    assert (first.session_id, second.session_id) == (older.session_id, silent.session_id)
    assert first.requeued == (replace(records[0], state=State.QUEUED, session_id=None),)
    assert first.to_end == (replace(records[1], cancel_cause=CancelCause.CLIENT),)
    assert (second.requeued, second.to_end) == ((), ())
    assert await store.running_of([newer.session_id]) == [GenerationSummary.of(own)]
    assert [session.session_id for session in await store.list_sessions()] == [newer.session_id]
    assert await store.lose_older(newer.session_id, 1, now=NOW) == []


async def test_a_second_worker_with_the_same_id_at_another_address_replaces_nobody(store: Store) -> None:
    # The first one may only be paused; it still has its address.
    await store.open_session(new_session(address="127.0.0.1:1"), lease=LEASE)
    twin = new_session(address="127.0.0.1:2")
    await store.open_session(twin, lease=LEASE)
    assert await store.lose_older(twin.session_id, 1) == []
    assert len(await store.list_sessions()) == 2


async def test_another_worker_at_the_same_address_replaces_nobody(store: Store) -> None:
    # One proxy may stand for many workers.
    await store.open_session(new_session(worker_id="worker-1"), lease=LEASE)
    other = new_session(worker_id="worker-2")
    await store.open_session(other, lease=LEASE)
    assert await store.lose_older(other.session_id, 1) == []
    assert len(await store.list_sessions()) == 2


async def test_an_older_session_that_is_opened_late_does_not_replace_the_newer_one(store: Store) -> None:
    older, newer = new_session(), new_session()
    await store.open_session(newer, lease=LEASE)
    await store.open_session(older, lease=LEASE)
    assert await store.lose_older(older.session_id, 1) == []
    assert len(await store.list_sessions()) == 2


async def test_only_the_owner_of_a_live_session_replaces_older_ones(store: Store) -> None:
    older, newer = new_session(), new_session()
    for session in (older, newer, newer):
        await store.open_session(session, lease=LEASE)
    assert await store.lose_older(newer.session_id, 1) == []
    await store.lose_session(newer.session_id, 2)
    assert await store.lose_older(newer.session_id, 2) == []
    assert [session.session_id for session in await store.list_sessions()] == [older.session_id]


async def test_a_lost_session_requeues_its_attempts_and_leaves_those_to_be_ended(store: Store) -> None:
    session_id, bystander = await opened(store), await opened(store)
    kept = await granted(store, await submitted(store), bystander)
    records = [await granted(store, await submitted(store), session_id) for _ in range(3)]
    await store.request_cancel_many([(records[1].generation_id, CancelCause.CLIENT)])
    lost = await store.lose_session(session_id, 1, now=NOW)
    assert lost is not None
    assert lost.session_id == session_id
    requeued = tuple(replace(record, state=State.QUEUED, session_id=None) for record in (records[0], records[2]))
    assert lost.requeued == requeued
    assert lost.to_end == (replace(records[1], cancel_cause=CancelCause.CLIENT),)
    assert await store.orphans(limit=5) == list(lost.to_end)
    running = await store.running_of([session_id, bystander])
    assert running == [GenerationSummary.of(record) for record in (kept, *lost.to_end)]
    assert [record.state for record in await store.list_sessions(include_over=True)].count(SessionState.LOST) == 1


async def test_only_the_owner_loses_a_session_and_only_once(store: Store) -> None:
    session_id = await opened(store)
    assert await store.lose_session(session_id, 2) is None
    assert await store.lose_session(session_id, 1) is not None
    assert await store.lose_session(session_id, 1) is None


async def test_a_lost_session_cannot_come_back(store: Store) -> None:
    session = new_session()
    await store.open_session(session, lease=LEASE)
    await store.lose_session(session.session_id, 1)
    result = await store.open_session(session, lease=LEASE)
    assert (result.kind, result.owner_epoch, result.running) == (OpenKind.OVER, 1, ())
    assert await store.list_sessions() == []


async def test_only_sessions_whose_lease_is_over_expire(store: Store) -> None:
    silent = new_session()
    await store.open_session(silent, lease=LEASE, now=NOW)
    renewed = await opened(store)
    record = await granted(store, await submitted(store), silent.session_id)
    await store.renew_many([Renewal(session_id=renewed, owner_epoch=1)], lease=LEASE, now=NOW + LEASE)
    assert await store.lose_expired(limit=5, now=NOW + LEASE) == []
    [lost] = await store.lose_expired(limit=5, now=OVER)
    assert lost.session_id == silent.session_id
    assert lost.requeued == (replace(record, state=State.QUEUED, session_id=None),)
    assert [session.session_id for session in await store.list_sessions()] == [renewed]
    assert await store.lose_expired(limit=5, now=OVER) == []


async def test_expiry_takes_at_most_the_limit_and_each_session_once(store: Store) -> None:
    sessions = {await opened(store) for _ in range(5)}
    answers = await asyncio.gather(*(store.lose_expired(limit=2, now=OVER) for _ in range(2)))
    rest = await store.lose_expired(limit=5, now=OVER)
    assert all(len(answer) <= 2 for answer in answers)
    lost = [session.session_id for answer in [*answers, rest] for session in answer]
    assert sorted(lost) == sorted(sessions)


async def test_a_session_ends_only_when_nothing_runs_on_it(store: Store) -> None:
    session_id = await opened(store)
    record = await granted(store, await submitted(store), session_id)
    assert not await store.end_session(session_id, 1)
    await store.finish_many([finish_of(record)])
    assert not await store.end_session(session_id, 2)
    assert await store.end_session(session_id, 1)
    assert not await store.end_session(session_id, 1)
    [refused] = await store.grant_many([grant_request(await submitted(store), session_id)])
    assert refused.kind is GrantKind.FENCED
    [ended] = await store.list_sessions(include_over=True)
    assert ended.state is SessionState.ENDED


async def test_a_grant_and_a_loss_at_once_never_leave_an_attempt_behind(store: Store) -> None:
    for _ in range(10):
        session_id, record = await opened(store), await submitted(store)
        [answer], lost = await asyncio.gather(
            store.grant_many([grant_request(record, session_id)]), store.lose_session(session_id, 1)
        )
        assert lost is not None
        was_granted = answer.kind is GrantKind.GRANTED
        assert [row.generation_id for row in lost.requeued] == ([record.generation_id] if was_granted else [])
        assert (await state_of(store, record)).state is State.QUEUED
    assert await store.orphans(limit=5) == []


async def test_a_grant_and_a_takeover_at_once_never_leave_an_attempt_behind(store: Store) -> None:
    for _ in range(10):
        session, record = new_session(), await submitted(store)
        await store.open_session(session, lease=LEASE)
        [answer], taken = await asyncio.gather(
            store.grant_many([grant_request(record, session.session_id)]), store.open_session(session, lease=LEASE)
        )
        handed_over = [row.generation_id for row in taken.running]
        assert handed_over == ([record.generation_id] if answer.kind is GrantKind.GRANTED else [])
