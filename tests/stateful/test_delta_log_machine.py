"""Schedulers with stale attempts, repeats, reordering, losses and seals: what a reader saw stays one output, never a splice.

Token ids name the attempt that produced them (attempt x 10,000 + position). The truth is the output of the newest attempt's
worker: what its log held when it was opened, then its own tokens. A reader who follows pushes and attaches may lag behind
it; it may never have seen anything else.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

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

from service_kit.delta import EMPTY_CHAIN, Cursor, Delta, extend_chain, rest_after
from service_kit.ids import new_generation_id
from sluice.local.valkey import LocalValkey
from state_store.delta_log.port import AppendItem, AppendStatus, LogEnd, Push, SealItem
from state_store.model import State
from tests.support.delta_logs import Follower, LogUnderTest, delta_after, memory_log, valkey_log

NUM_IDS_PER_ATTEMPT = 10_000
ATTEMPTS = st.integers(1, 6)
NUM_TOKENS = st.integers(1, 4)


@dataclass
class Worker:
    """One attempt as its scheduler and worker see it: `base` is what is stored elsewhere, `deltas` can be sent again."""

    attempt: int
    base: Cursor
    token_ids: list[int]
    deltas: list[Delta] = field(default_factory=list)

    @property
    def end(self) -> Cursor:
        return self.deltas[-1].end if self.deltas else self.base

    def produce(self, num_tokens: int) -> None:
        first = self.end.sequence_number + 1
        ids = [self.attempt * NUM_IDS_PER_ATTEMPT + position for position in range(first, first + num_tokens)]
        self.deltas.append(delta_after(self.end, *ids))
        self.token_ids += ids

    def item(self, index: int, generation_id: Any) -> AppendItem:
        delta = self.deltas[index % len(self.deltas)]
        return AppendItem(generation_id=generation_id, attempt=self.attempt, delta=delta)


class LogMachine(RuleBasedStateMachine):
    """`make_log` and `runner` are set by the tests."""

    runner: asyncio.Runner

    async def make_log(self) -> LogUnderTest:
        raise NotImplementedError

    def await_(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    @initialize()
    def begin(self) -> None:
        self.generation_id = new_generation_id()
        self.under_test: LogUnderTest = self.await_(self.make_log())
        self.log = self.under_test.log
        self.workers: dict[int, Worker] = {}
        self.seen: list[int] = []
        self.reader = Cursor()
        self.is_lost = False
        self.is_ended = False
        self.follower = Follower(self.log, f"gw-{self.generation_id}")
        self.await_(self.follower.start())
        self.attach()
        self.grant()

    @property
    def newest(self) -> Worker:
        return self.workers[max(self.workers)]

    @precondition(lambda self: not self.is_lost and not self.is_ended and len(self.workers) < 6)
    @rule()
    def grant(self) -> None:
        """The next attempt: open, and assign exactly what open returned; all of it is stored before."""
        attempt = len(self.workers) + 1
        base = self.newest.base if self.workers else Cursor()
        opened = self.await_(self.under_test.open(self.generation_id, attempt, base))
        assert opened.is_opened
        logged = [token_id for delta in opened.deltas for token_id in delta.token_ids]
        stored = self.newest.token_ids[: opened.base.sequence_number] if self.workers else []
        assert extend_chain(EMPTY_CHAIN, [*stored, *logged]) == opened.end.chain
        self.workers[attempt] = Worker(attempt=attempt, base=opened.end, token_ids=[*stored, *logged])

    @rule(attempt=ATTEMPTS, num_tokens=NUM_TOKENS)
    def produce(self, attempt: int, num_tokens: int) -> None:
        if attempt in self.workers and len(self.workers[attempt].deltas) < 8:
            self.workers[attempt].produce(num_tokens)

    @rule(picks=st.lists(st.tuples(ATTEMPTS, st.integers(0, 7)), min_size=1, max_size=6), is_one_call=st.booleans())
    def append_in_any_order(self, picks: list[tuple[int, int]], is_one_call: bool) -> None:
        items = [
            self.workers[attempt].item(index, self.generation_id)
            for attempt, index in picks
            if attempt in self.workers and self.workers[attempt].deltas
        ]
        calls = [items] if is_one_call else [[item] for item in items]

        async def append() -> list[AppendStatus]:
            results = await asyncio.gather(*(self.log.append_many(call) for call in calls))
            return [result.status for part in results for result in part]

        for item, status in zip(items, self.await_(append()), strict=True):
            if item.attempt < self.newest.attempt or self.is_ended:
                assert status in (AppendStatus.STALE, AppendStatus.ABSENT)
            elif self.is_lost:
                assert status is AppendStatus.ABSENT

    @precondition(lambda self: self.newest.deltas and not self.is_lost and not self.is_ended)
    @rule()
    def send_all_of_the_newest_attempt(self) -> None:
        self._resend()

    @rule(attempt=ATTEMPTS)
    def open_again(self, attempt: int) -> None:
        """A repeated open, or one by a scheduler that was paused: with a log there, it is refused."""
        if attempt in self.workers and not self.is_lost:
            assert not self.await_(
                self.under_test.open(self.generation_id, attempt, self.workers[attempt].base)
            ).is_opened

    @rule(attempt=ATTEMPTS)
    def seal_a_stale_attempt(self, attempt: int) -> None:
        if attempt < self.newest.attempt:
            self.await_(self.log.seal_many([SealItem(generation_id=self.generation_id, attempt=attempt)]))

    @precondition(lambda self: len(self.workers) < 6)
    @rule()
    def seal_the_newest_and_grant(self) -> None:
        if not self.is_lost and not self.is_ended:
            self.await_(self.under_test.seal(self.generation_id, self.newest.attempt))
            self.grant()

    @rule()
    def lose_the_log(self) -> None:
        if not self.is_ended:
            self.await_(self.under_test.lose_all())
            self.is_lost = True

    @precondition(lambda self: self.is_lost)
    @rule()
    def refill_the_log(self) -> None:
        """What a coordinator does about ABSENT: opens at the stored base, and the worker sends again all it produced."""
        assert self.await_(self.under_test.open(self.generation_id, self.newest.attempt, self.newest.base)).is_opened
        self.is_lost = False
        self._resend()

    @precondition(lambda self: not self.is_lost)
    @rule()
    def end(self) -> None:
        if len(self.newest.token_ids) > 12 and not self.is_ended:
            end = LogEnd(state=State.SUCCEEDED, output_tokens=0, prompt_tokens=1, cached_prompt_tokens=0)
            self.await_(self.under_test.seal(self.generation_id, self.newest.attempt, end))
            self.is_ended = True

    @rule()
    def read_pushes(self) -> None:
        pushes = [push for batch in self.await_(self.follower.batches()) for push in batch]
        for push in pushes:
            self._take_push(push)

    @rule()
    def attach(self) -> None:
        (view,) = self.await_(
            self.log.attach_many(self.follower.gateway_id, [(self.generation_id, self.reader.sequence_number)])
        )
        for delta in view.deltas:
            if delta.first <= self.reader.sequence_number + 1:
                self._take(delta)

    @invariant()
    def what_was_seen_is_the_output_of_the_newest_attempt(self) -> None:
        assert self.seen == self.newest.token_ids[: len(self.seen)]
        attempts = [token_id // NUM_IDS_PER_ATTEMPT for token_id in self.seen]
        assert attempts == sorted(attempts)
        assert self.reader == Cursor(sequence_number=len(self.seen), chain=extend_chain(EMPTY_CHAIN, self.seen))

    @invariant()
    def the_log_is_one_chain(self) -> None:
        view = self.await_(self.under_test.read(self.generation_id))
        assert view.is_present != self.is_lost
        cursor = view.base
        for delta in view.deltas:
            assert (delta.first, delta.prev_chain) == (cursor.sequence_number + 1, cursor.chain)
            cursor = delta.end
        assert cursor == view.end

    def teardown(self) -> None:
        self.await_(self.follower.stop())

    def _resend(self) -> None:
        worker = self.newest
        items = [worker.item(index, self.generation_id) for index in range(len(worker.deltas))]
        for result in self.await_(self.log.append_many(items)):
            assert result.status in (AppendStatus.OK, AppendStatus.DUP)

    def _take_push(self, push: Push) -> None:
        if push.delta is None:
            return
        if push.delta.first > self.reader.sequence_number + 1:
            self.attach()
        else:
            self._take(push.delta)

    def _take(self, delta: Delta) -> None:
        """As a gateway does: what does not continue number and chain raises."""
        rest = rest_after(self.reader, delta)
        if rest is not None:
            self.seen += rest.token_ids
            self.reader = rest.end


def _run(machine: type[LogMachine], max_examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=30,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_readers_of_the_memory_twin_see_one_output() -> None:
    with asyncio.Runner() as runner:

        class MemoryMachine(LogMachine):
            async def make_log(self) -> LogUnderTest:
                return memory_log()

        MemoryMachine.runner = runner
        _run(MemoryMachine, max_examples=200)


def test_readers_of_valkey_see_one_output(valkey_server: LocalValkey) -> None:
    with asyncio.Runner() as runner:
        context = valkey_log(valkey_server.url)
        under_test = runner.run(context.__aenter__())

        class ValkeyMachine(LogMachine):
            async def make_log(self) -> LogUnderTest:
                return under_test

        ValkeyMachine.runner = runner
        try:
            _run(ValkeyMachine, max_examples=60)
        finally:
            runner.run(context.__aexit__(None, None, None))
