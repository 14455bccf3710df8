"""The admission queue on a real server beside its memory twin: the same answers and the same contents, whatever happens.

The twin is what the scripts are compared with; that it is right is for the contract suite. Here besides: nothing is lost or
handed out twice, counters are refunded exactly, and an idle queue leaves nothing.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from scheduler.queue.codec import pop_cost_of, tenant_name
from scheduler.queue.memory import MemoryAdmissionQueue
from scheduler.queue.port import BoundCheck, OutputCharge, Popped, QueueEntry, SessionRoom
from scheduler.queue.redis_queue import RedisAdmissionQueue
from scheduler.queue.settings import QueueSettings
from service_kit.ids import GenerationId, TenantId
from state_store.model import PriorityClass
from tests.support.admission_queues import ARRIVAL, MODEL, QueueUnderTest, entry_of, room_of, server_queue
from tests.support.queue_keys import Contents, Live, contents_of, read_contents, without_history

SETTINGS = QueueSettings(
    max_requests=(6, 6, 6),
    max_prompt_tokens=(200, 200, 200),
    max_tenant_requests=8,
    max_tenant_prompt_tokens=300,
    wait_thresholds=(timedelta(seconds=1), timedelta(seconds=2), timedelta(seconds=3)),
    skip_patience=timedelta(seconds=1),
    starving_after=timedelta(seconds=2),
    max_passed=4,
    max_passed_of_tenant=2,
    max_oversized=3,
    rebase_counters_at=60_000_000,
)
TENANTS = ("a", "b", "ü:{x}")
TURN_TAKER, NEVER_QUEUED = "c", "never queued"
SESSIONS = ("s", "t", "u")
SECONDS = st.integers(0, 24).map(lambda quarters: quarters * 0.25)
SIZES = st.integers(1, 100)
ENTRIES = st.builds(
    entry_of,
    st.sampled_from(TENANTS),
    arrived_ms=st.just(0),
    order_ms=st.integers(0, 3),
    attempt=st.sampled_from([0, 0, 1]),
    prompt_tokens=st.integers(0, 60),
    max_tokens=SIZES,
    weight=st.sampled_from([0.5, 1.0, 3.0]),
    priority_class=st.sampled_from(PriorityClass),
    is_charged=st.sampled_from([False, False, False, True]),
    generation_id=st.uuids(version=4).map(lambda each: GenerationId(str(each))),
)
DESCENDING = st.lists(st.integers(0, 150), min_size=3, max_size=3).map(lambda sizes: sorted(sizes, reverse=True))
NUM_ENTRIES = st.lists(st.integers(0, 5), min_size=3, max_size=3).map(lambda sizes: sorted(sizes, reverse=True))


@st.composite
def rooms(draw: st.DrawFn) -> list[SessionRoom]:
    return [
        room_of(
            draw(DESCENDING),
            entries=draw(NUM_ENTRIES),
            session=session,
            capacity=draw(st.sampled_from([60, 90, 150])),
            max_charged=draw(st.integers(0, 2)),
        )
        for session in draw(st.lists(st.sampled_from(SESSIONS), unique=True, max_size=3))
    ]


class QueueMachine(RuleBasedStateMachine):
    """`server` and `runner` are set by the test; `held` are pops nobody has ended, as the server and the twin named them."""

    runner: asyncio.Runner
    server: QueueUnderTest

    @initialize(turn=st.sampled_from([0, 6, 7]))
    def begin(self, turn: int) -> None:
        self.clock = self.server.clock
        self.clock.advance(ARRIVAL - self.clock())
        assert isinstance(self.server.queue, RedisAdmissionQueue)
        self.redis = self.server.queue
        self.twin = MemoryAdmissionQueue(self.clock, SETTINGS)
        self.held: list[tuple[Popped, Popped]] = []
        self.known: list[QueueEntry] = []
        self.await_(self.server.lose_all())
        self.both("mark_ready")
        self.take_turns(turn)

    def await_(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def both(self, method: str, *arguments: Any, **options: Any) -> Any:
        """The answer that both give."""
        theirs = self.await_(getattr(self.redis, method)(*arguments, **options))
        ours = self.await_(getattr(self.twin, method)(*arguments, **options))
        assert theirs == ours
        return ours

    @rule(entries=st.lists(ENTRIES, min_size=1, max_size=4), lives=st.none() | SECONDS, waits=st.none() | SECONDS)
    def enqueue(self, entries: list[QueueEntry], lives: float | None, waits: float | None) -> None:
        now = self.clock()
        entries = [
            replace(
                entry,
                arrived_at=now,
                order_at=now + (entry.order_at - ARRIVAL),
                deadline_at=None if lives is None else now + timedelta(seconds=lives),
                ready_at=None if waits is None else now + timedelta(seconds=waits),
            )
            for entry in entries
        ]
        self.both("enqueue_many", entries)
        self.known += entries

    @rule(pick=st.integers(0, 99), by=st.integers(-1, 2), priority_class=st.sampled_from(PriorityClass))
    def enqueue_again(self, pick: int, by: int, priority_class: PriorityClass) -> None:
        """The same, an older or a newer attempt of something known."""
        if self.known:
            index = pick % len(self.known)
            entry = self.known[index]
            again = replace(entry, attempt=max(0, entry.attempt + by), priority_class=priority_class, deadline_at=None)
            self.both("enqueue_many", [again])
            self.known[index] = max(entry, again, key=lambda each: each.attempt)

    @rule(into=rooms(), max_entries=st.integers(0, 12))
    def pop(self, into: list[SessionRoom], max_entries: int) -> None:
        theirs = self.await_(self.redis.pop(MODEL, into, max_entries=max_entries))
        ours = self.await_(self.twin.pop(MODEL, into, max_entries=max_entries))
        assert [replace(pop, pop_id="") for pop in theirs] == [replace(pop, pop_id="") for pop in ours]
        in_flight = {id_of(twins[1]) for twins in self.held if self.is_held(twins[1])}
        assert not in_flight & {id_of(pop) for pop in ours}
        assert len({pop.pop_id for pop in theirs}) == len(theirs)
        self.held += zip(theirs, ours, strict=True)

    @rule(number=st.integers(1, 7))
    def take_turns(self, number: int) -> None:
        """Popping small ones brings the rule of age nearer."""
        small = [entry_of(TURN_TAKER, max_tokens=1, priority_class=PriorityClass.INTERACTIVE) for _ in range(number)]
        small = [replace(entry, arrived_at=self.clock(), order_at=self.clock()) for entry in small]
        self.both("enqueue_many", small)
        self.known += small
        self.pop([room_of(number, entries=(number, 0, 0), session="v", capacity=number)], number)

    @rule(
        seconds=st.sampled_from([1.0, 2.0, 3.0]),
        size=st.integers(60, 90),
        priority_class=st.sampled_from(PriorityClass),
    )
    def overtake(self, seconds: float, size: int, priority_class: PriorityClass) -> None:
        """Something large is skipped by a session that could hold it when empty."""
        entry = replace(entry_of("b", max_tokens=size, priority_class=priority_class), arrived_at=self.clock())
        self.both("enqueue_many", [entry])
        self.known.append(entry)
        for _ in range(2):
            self.pop([room_of((50, 40, 40), session="s", capacity=90)], 2)
            self.wait(seconds)

    @rule(picks=st.lists(st.integers(0, 99), min_size=1, max_size=4), end=st.sampled_from(["ack", "drop", "return"]))
    def end_pops(self, picks: list[int], end: str) -> None:
        """Also of pops that ended before."""
        pairs = [self.held[pick % len(self.held)] for pick in picks] if self.held else []
        before = dict(self.twin.state_of(MODEL).counters.active)
        owed: dict[str, int] = {}
        for pop in {pop.pop_id: pop for _, pop in pairs if self.is_held(pop)}.values():
            tenant = tenant_name(pop.entry.tenant_id)
            owed[tenant] = owed.get(tenant, 0) + pop_cost_of(pop.entry)
        self.await_(getattr(self.redis, f"{end}_many")([theirs for theirs, _ in pairs]))
        self.await_(getattr(self.twin, f"{end}_many")([ours for _, ours in pairs]))
        for tenant, counter in self.twin.state_of(MODEL).counters.active.items():
            assert counter == before[tenant] - (0 if end == "ack" else owed.get(tenant, 0))

    @rule(tenants=st.lists(st.sampled_from((*TENANTS, NEVER_QUEUED)), max_size=4), tokens=st.integers(0, 80))
    def charge(self, tenants: list[str], tokens: int) -> None:
        self.both("charge_many", [OutputCharge(model_key=MODEL, tenant_id=TenantId(t), tokens=tokens) for t in tenants])

    @rule(picks=st.lists(st.integers(0, 99), max_size=3))
    def remove(self, picks: list[int]) -> None:
        if self.known:
            items = [(MODEL, self.known[pick % len(self.known)].generation_id) for pick in picks]
            self.both("remove_many", items)

    @rule()
    def reap(self) -> None:
        self.both("reap_in_flight", [MODEL])

    @rule(tenants=st.lists(st.sampled_from(TENANTS), min_size=1, max_size=3), tokens=st.integers(0, 90))
    def check(self, tenants: list[str], tokens: int) -> None:
        checks = [
            BoundCheck(model_key=MODEL, tenant_id=TenantId(tenant), priority_class=each, prompt_tokens=tokens)
            for tenant in tenants
            for each in PriorityClass
        ]
        self.both("check_many", checks)

    @rule(seconds=SECONDS)
    def wait(self, seconds: float) -> None:
        self.clock.advance(timedelta(seconds=seconds))

    @rule()
    def look(self) -> None:
        self.both("depth", MODEL)
        self.both("model_keys")
        self.both("contains_many", [(MODEL, entry.generation_id, entry.attempt) for entry in self.known])

    @invariant()
    def the_server_holds_exactly_what_the_twin_does(self) -> None:
        contents = self.await_(read_contents(self.redis._client))
        assert without_history(contents) == contents_of(self.live())
        self.compare_history(contents)

    def live(self) -> list[Live]:
        """By the twin, under the server's pop ids."""
        theirs = {ours.pop_id: pop.pop_id for pop, ours in self.held}
        return [
            Live(
                entry=slot.entry,
                pop_id=None if slot.pop_id is None else theirs[slot.pop_id],
                held_until_us=slot.held_until_us,
                is_delayed=slot.is_delayed,
            )
            for slot in self.twin.state_of(MODEL).slots.values()
        ]

    def compare_history(self, contents: Contents) -> None:
        state = self.twin.state_of(MODEL)
        counters, pops, meta = state.counters, state.pops, contents.get("meta", {})
        assert contents.get("counters", {}) == counters.active
        assert contents.get("idle_counters", {}) == counters.idle
        for key, members in contents.items():
            if key.startswith("tenants:"):
                assert members == {tenant: counters.active[tenant] for tenant in members}
        found = [meta.get(field, 0) for field in ("floor", "turn", "window", "popped", "popped_before")]
        assert found == [counters.floor, state.turn, pops.window, pops.popped, pops.popped_before]
        assert contents.get("skipped", {}) == state.skipped_since_us
        earmarks = state.earmarks.entry_by_session
        assert {session: entry.decode() for session, entry in contents.get("earmarks", {}).items()} == earmarks
        marked = {entry: session.decode() for entry, session in contents.get("earmarked", {}).items()}
        assert marked == {entry: session for session, entry in earmarks.items()}
        assert contents.get("earmark_leases", {}) == state.earmarks.until_us_by_session
        starving = meta.get("starving")
        assert (None if starving is None else starving.decode()) == state.earmarks.starving
        assert starving is None or starving.decode() in earmarks.values()

    def is_held(self, pop: Popped) -> bool:
        slot = self.twin.state_of(MODEL).slots.get(pop.entry.generation_id)
        return slot is not None and slot.pop_id == pop.pop_id

    def teardown(self) -> None:
        """When idle nothing of a request is left, and at most one counter of each tenant."""
        if not hasattr(self, "twin"):
            return
        self.both("remove_many", [(MODEL, entry.generation_id) for entry in self.known])
        contents = self.await_(read_contents(self.redis._client))
        assert contents.keys() <= {"marker", "meta", "idle_counters"}
        names = {tenant_name(TenantId(tenant)) for tenant in (*TENANTS, TURN_TAKER, NEVER_QUEUED)}
        assert contents.get("idle_counters", {}).keys() <= names


def id_of(pop: Popped) -> GenerationId:
    return pop.entry.generation_id


@pytest.mark.parametrize("server", ["valkey", "redis"])
def test_the_scripts_and_the_memory_twin_do_the_same(request: pytest.FixtureRequest, server: str) -> None:
    url = request.getfixturevalue(f"{server}_server").url
    with asyncio.Runner() as runner:
        context = server_queue(url, SETTINGS)
        under_test = runner.run(context.__aenter__())

        class Machine(QueueMachine):
            pass

        Machine.runner, Machine.server = runner, under_test
        try:
            run_state_machine_as_test(
                Machine,
                settings=settings(
                    max_examples=30,
                    stateful_step_count=30,
                    deadline=None,
                    database=None,
                    phases=[Phase.generate, Phase.shrink],  # to explain a failure means to trace every line of the twin
                    suppress_health_check=list(HealthCheck),
                ),
            )
        finally:
            runner.run(context.__aexit__(None, None, None))
