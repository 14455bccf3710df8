"""Random histories on the memory twin and on Postgres at once: equal answers, equal rows, and what must always hold."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from service_kit.delta import Cursor, TokenLogprob, make_delta
from service_kit.errors import Reason
from service_kit.ids import GenerationId, RequestId, SchedulerId, SessionId, TenantId
from service_kit.sampling import FinishReason
from state_store.memory.store import MemoryStore
from state_store.model import (
    AttemptOutcome,
    CancelCause,
    Finish,
    GenerationRecord,
    ModelKey,
    NewSession,
    SessionState,
    State,
)
from state_store.ports import AttemptEnd, AttemptRef, ChunkWrite, GrantRequest, OpenKind, Renewal
from state_store.postgres.store import PostgresStore
from state_store.transitions import TRANSITIONS
from tests.support.generations import LEASE, MODEL_KEY, NOW, Store, new_generation, new_session
from tests.support.postgres import empty

OTHER_KEY = ModelKey(revision="revision-2", precision="fp32")
EDGES = {(start, end) for (start, _), end in TRANSITIONS.items()}
FINAL = [state for state in State if state.is_terminal]
mostly_zero = st.sampled_from([0, 0, 0, 0, 0, 1, -1])
bases = st.sampled_from([1, 1, 1, 7])
ANY_STATE_FROM = 26
ANY_SESSION_FROM = 9
MAX_LIVE_SESSIONS = 2
indexes = st.lists(st.integers(0, 30), min_size=1, max_size=3)


@dataclass(frozen=True)
class Stores:
    """Both stores and the loop in which Postgres' pool lives."""

    runner: asyncio.Runner
    memory: MemoryStore
    postgres: PostgresStore


class StoreMachine(RuleBasedStateMachine):
    """Picks its arguments around the current rows, sometimes beside them."""

    def __init__(self, runner: asyncio.Runner, postgres: PostgresStore) -> None:
        super().__init__()
        self.stores = Stores(runner, MemoryStore(), postgres)
        self.now = NOW
        self.generation_ids: list[GenerationId] = []
        self.sessions: list[NewSession] = []
        self.seen: dict[GenerationId, GenerationRecord] = {}
        self.epochs: dict[SessionId, int] = {}

    def both(self, call: Callable[[Store], Awaitable[Any]]) -> Any:
        """The answer of both stores, which must be equal."""

        async def run() -> tuple[Any, Any]:
            return await call(self.stores.memory), await call(self.stores.postgres)

        memory, postgres = self.stores.runner.run(run())
        assert memory == postgres
        return postgres

    def rows(self, indexes: list[int], *wanted: State) -> list[GenerationRecord]:
        """Rows, in one of the wanted states if there are any; high indexes do not look at the state."""
        rows = list(self.seen.values())
        fitting = [row for row in rows if row.state in wanted] or rows
        chosen = [(fitting if index < ANY_STATE_FROM else rows, index) for index in indexes]
        return [among[index % len(among)] for among, index in chosen]

    def sessions_in(self, state: SessionState) -> list[NewSession]:
        rows = self.stores.memory._data.sessions
        return [session for session in self.sessions if rows[session.session_id].state is state]

    def session(self, index: int) -> NewSession:
        """A session, a live one if there is one; the highest indexes do not look at the state."""
        live = self.sessions_in(SessionState.LIVE) if index < ANY_SESSION_FROM else []
        return (live or self.sessions)[index % len(live or self.sessions)]

    @initialize()
    def start(self) -> None:
        """Something to work on, whichever rules this history may use."""
        self.stores.runner.run(empty(self.stores.postgres))
        self.announce()
        items = [new_generation() for _ in range(3)]
        self.both(lambda store: store.submit_many(items, now=self.now))
        self.generation_ids.extend(item.generation_id for item in items)

    @rule(data=st.data(), size=st.integers(1, 3))
    def submit(self, data: st.DataObject, size: int) -> None:
        items = [
            new_generation(
                request_id=RequestId(f"request-{data.draw(st.integers(0, 6))}"),
                tenant_id=TenantId(data.draw(st.sampled_from(["a", "a", "b"]))),
                request_hash=data.draw(st.sampled_from([b"1", b"1", b"2"])),
                model_key=data.draw(st.sampled_from([MODEL_KEY, MODEL_KEY, MODEL_KEY, OTHER_KEY])),
                deadline=data.draw(st.sampled_from([None, timedelta(seconds=20)])),
            )
            for _ in range(size)
        ]
        self.both(lambda store: store.submit_many(items, now=self.now))
        self.generation_ids.extend(item.generation_id for item in items)

    @precondition(lambda self: len(self.sessions_in(SessionState.LIVE)) < MAX_LIVE_SESSIONS)
    @rule()
    def announce(self) -> None:
        self.sessions.append(new_session(worker_id=f"worker-{len(self.sessions) % 3}"))
        self.open_session(self.sessions[-1])

    @precondition(lambda self: self.sessions)
    @rule(index=st.integers(0, 9), scheduler=st.sampled_from(["scheduler-1", "scheduler-2"]))
    def take_over(self, index: int, scheduler: str) -> None:
        self.open_session(replace(self.session(index), scheduler_id=SchedulerId(scheduler)))

    def open_session(self, session: NewSession) -> None:
        opened = self.both(lambda store: store.open_session(session, lease=LEASE, now=self.now))
        before = self.epochs.get(session.session_id, 0)
        assert opened.owner_epoch == before + (opened.kind is OpenKind.OPENED)
        self.epochs[session.session_id] = opened.owner_epoch

    @precondition(lambda self: self.sessions and self.seen)
    @rule(
        rows=indexes,
        index=st.integers(0, 9),
        attempt=mostly_zero,
        epoch=mostly_zero,
        nonce=st.integers(1, (1 << 64) - 1),
    )
    def grant(self, rows: list[int], index: int, attempt: int, epoch: int, nonce: int) -> None:
        session_id = self.session(index).session_id
        items = [
            GrantRequest(
                generation_id=row.generation_id,
                after_attempt=row.attempt + attempt,
                session_id=session_id,
                owner_epoch=self.epochs[session_id] + epoch,
                nonce=nonce,
            )
            for row in self.rows(rows, State.QUEUED)
        ]
        self.both(lambda store: store.grant_many(items, now=self.now))

    @precondition(lambda self: self.seen)
    @rule(rows=indexes, data=st.data())
    def finish(self, rows: list[int], data: st.DataObject) -> None:
        ends = self.both(lambda store: store.stored_ends_many(self.generation_ids))
        items = []
        for row in self.rows(rows, State.RUNNING):
            stored = ends[self.generation_ids.index(row.generation_id)].sequence_number
            length = stored + data.draw(st.integers(0, 3))
            state = data.draw(st.sampled_from(FINAL))
            items.append(
                Finish(
                    generation_id=row.generation_id,
                    from_state=row.state,
                    attempt=row.attempt + data.draw(mostly_zero),
                    state=state,
                    output=_output(length, data.draw(bases)),
                    output_tokens=max(0, length + data.draw(mostly_zero)),
                    finish_reason=FinishReason.STOP if state is State.SUCCEEDED else None,
                    error_reason=Reason.ATTEMPTS_EXHAUSTED if state is State.FAILED else None,
                )
            )
        self.both(lambda store: store.finish_many(items, now=self.now))

    @precondition(lambda self: self.seen)
    @rule(rows=indexes, attempt=mostly_zero, length=st.integers(1, 5), base=bases)
    def store_chunks(self, rows: list[int], attempt: int, length: int, base: int) -> None:
        delta = _output(length, base)
        assert delta is not None
        items = [
            ChunkWrite(generation_id=row.generation_id, attempt=row.attempt + attempt, output=delta)
            for row in self.rows(rows, State.RUNNING)
        ]
        self.both(lambda store: store.store_chunks_many(items))

    @precondition(lambda self: self.seen)
    @rule(rows=indexes, attempt=mostly_zero)
    def requeue(self, rows: list[int], attempt: int) -> None:
        items = [
            AttemptRef(generation_id=row.generation_id, attempt=row.attempt + attempt)
            for row in self.rows(rows, State.RUNNING)
        ]
        self.both(lambda store: store.requeue_many(items, now=self.now))

    @precondition(lambda self: self.seen)
    @rule(rows=indexes, attempt=mostly_zero, outcome=st.sampled_from(AttemptOutcome), is_charged=st.booleans())
    def record_end(self, rows: list[int], attempt: int, outcome: AttemptOutcome, is_charged: bool) -> None:
        items = [
            AttemptEnd(
                generation_id=row.generation_id,
                attempt=row.attempt + attempt,
                outcome=outcome,
                end_position=0,
                is_charged=is_charged,
            )
            for row in self.rows(rows, State.RUNNING)
        ]
        self.both(lambda store: store.record_attempt_ends(items, now=self.now))

    @precondition(lambda self: self.seen)
    @rule(rows=indexes, cause=st.sampled_from(CancelCause))
    def request_cancel(self, rows: list[int], cause: CancelCause) -> None:
        items = [(row.generation_id, cause) for row in self.rows(rows[:1], State.QUEUED, State.RUNNING)]
        self.both(lambda store: store.request_cancel_many(items))

    @precondition(lambda self: self.sessions)
    @rule(
        index=st.integers(0, 9),
        epoch=mostly_zero,
        how=st.sampled_from(["lose", "lose_older", "end", "renew", "renew", "renew"]),
        heard_ago=st.sampled_from([0, 1, 4]),
    )
    def decide_about_session(self, index: int, epoch: int, how: str, heard_ago: int) -> None:
        session_id = self.session(index).session_id
        owner_epoch = self.epochs[session_id] + epoch
        if how == "lose":
            self.both(lambda store: store.lose_session(session_id, owner_epoch, now=self.now))
        elif how == "lose_older":
            self.both(lambda store: store.lose_older(session_id, owner_epoch, now=self.now))
        elif how == "end":
            self.both(lambda store: store.end_session(session_id, owner_epoch))
        else:
            ago = timedelta(seconds=heard_ago)
            renewal = Renewal(session_id=session_id, owner_epoch=owner_epoch, heard_ago=ago)
            self.both(lambda store: store.renew_many([renewal], lease=LEASE, now=self.now))

    @rule(seconds=st.sampled_from([1, 1, 1, 3, 6, 90_000]), limit=st.integers(1, 3))
    def let_time_pass(self, seconds: int, limit: int) -> None:
        self.now += timedelta(seconds=seconds)
        self.both(lambda store: store.lose_expired(limit=limit, now=self.now))
        self.both(lambda store: store.prune_request_keys(limit=100, now=self.now))

    @invariant()
    def rows_are_equal_and_move_along_the_table(self) -> None:
        found = self.both(lambda store: store.get_many(self.generation_ids))
        for row in filter(None, found):
            before = self.seen.get(row.generation_id)
            if before is not None:
                _check_move(before, row)
            self.seen[row.generation_id] = row
        self.generation_ids = list(self.seen)

    @invariant()
    def pages_are_equal(self) -> None:
        self.both(lambda store: store.queued_page(after=None, min_age=timedelta(seconds=2), limit=5, now=self.now))
        self.both(lambda store: store.overdue_page(after=None, limit=5, now=self.now))
        self.both(lambda store: store.cancelled_queued_page(after=None, limit=5))
        self.both(lambda store: store.unwatchable_page(after=None, limit=5))
        self.both(lambda store: store.orphans(limit=5))
        self.both(lambda store: store.list_sessions(include_over=True))

    def teardown(self) -> None:
        self.both(lambda store: store.read_output_many(self.generation_ids))
        self.both(lambda store: store.dead_letters(limit=100))
        for row in self.seen.values():
            attempts = self.both(lambda store, row=row: store.attempts_of(row.generation_id))
            ledger = self.both(lambda store, row=row: store.ledger_of(row.generation_id))
            assert [attempt.attempt for attempt in attempts] == list(range(1, row.attempt + 1))
            assert sum(attempt.is_charged for attempt in attempts) == row.charged_attempts
            assert all(attempt.ended_at is not None for attempt in attempts[:-1])
            assert len(ledger) == row.state.is_terminal


def _output(length: int, base: int) -> Any:
    if length == 0:
        return None
    texts, logprobs = ["é"] * length, [TokenLogprob(-0.5, ((base, -0.25),))] * length
    if base == 1:
        texts, logprobs = ["\x00"] * length, []
    return make_delta(after=Cursor(), token_ids=[base] * length, texts=texts, logprobs=logprobs)


def _check_move(before: GenerationRecord, after: GenerationRecord) -> None:
    """Rows move along the table; final ones change no more but by a late charge; numbers only grow."""
    if before.state.is_terminal:
        assert after.state is before.state
        assert (after.output_tokens, after.finished_at) == (before.output_tokens, before.finished_at)
    assert after.state is before.state or (before.state, after.state) in EDGES
    assert after.attempt - before.attempt in (0, 1)
    assert after.charged_attempts >= before.charged_attempts
    assert before.cancel_cause in (None, after.cancel_cause)
    assert (after.session_id is not None) == (after.state is State.RUNNING)


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def test_random_histories_leave_both_stores_equal(runner: asyncio.Runner, store_dsn: str) -> None:
    postgres = PostgresStore(store_dsn)
    runner.run(postgres.open())
    try:
        run_state_machine_as_test(
            lambda: StoreMachine(runner, postgres),
            settings=settings(
                max_examples=20,
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        runner.run(postgres.close())
