"""Whole schedules on a memory of tokens: shared prefixes, classes, aborts, failures, tiny pools, with and without host.

After every step all parts agree, and every block that a step reads holds the tokens of the sequence that reads it. Some
schedules verify proposed tokens, of which nothing may be found that was not drawn.
"""

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.engine.block_pool import BlockPool
from gpu_worker.engine.sequence import Sequence
from gpu_worker.engine.step_scheduler import NeverFitsError, StepLimits, StepScheduler
from service_kit.prefix_hash import digest_of, prefix_root
from tests.support.fake_kv import FakeKv

BLOCK_SIZE = 4
ROOTS = [prefix_root(model_fingerprint="model", tenant_salt=salt) for salt in ("one", "two")]


@dataclass
class Rig:
    """A scheduler, the memory that its plans are executed on, and what was ever added."""

    num_blocks: int
    num_host_blocks: int
    limits: StepLimits
    live: dict = field(default_factory=dict)
    known: list = field(default_factory=list)
    findable: set = field(default_factory=set)
    guesses: random.Random | None = None
    """Decides what is proposed; None for nothing."""

    def __post_init__(self):
        pool = BlockPool(num_blocks=self.num_blocks, block_size=BLOCK_SIZE)
        self.drafts = None if self.guesses is None else GuessedDrafts(self.guesses)
        self.scheduler = StepScheduler(
            pool=pool, limits=self.limits, num_host_blocks=self.num_host_blocks, drafts=self.drafts
        )
        self.kv = FakeKv(num_blocks=self.num_blocks, block_size=BLOCK_SIZE, num_host_blocks=self.num_host_blocks)

    def add(self, *, prompt, output, priority, root):
        sequence = Sequence(
            sequence_id=f"s{len(self.known)}",
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            max_total_tokens=len(prompt) + output,
            priority=priority,
            prefix_root=root,
        )
        try:
            self.scheduler.add(sequence)
        except NeverFitsError:
            return
        self.known.append(sequence)
        self.live[sequence.sequence_id] = sequence

    def abort(self, number):
        if self.live:
            self._remove(sorted(self.live)[number % len(self.live)])

    def step(self, *, failing=None, moves_fail=False):
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        assert sum(len(planned.token_ids) for planned in plan.sequences) <= self.limits.token_budget
        assert bool(plan.sequences) == bool(self.live), "every step advances somebody"
        if moves_fail:
            self._fail_moves(plan.moves)
        else:
            self.kv.move(plan.moves)
        planned_ids = [planned.sequence_id for planned in plan.sequences if planned.sequence_id in self.live]
        failed = {planned_ids[failing % len(planned_ids)]} if failing is not None and planned_ids else ()
        self.kv.compute(plan, self.live, failing=failed)
        for sequence_id in failed:
            self._remove(sequence_id, is_suspect=len(self.live) % 2 == 0)
        sampled = {
            planned.sequence_id: draw(self.live[planned.sequence_id].token_ids, planned.draft_token_ids)
            for planned in plan.sequences
            if planned.is_sampled and planned.sequence_id in self.live
        }
        self.scheduler.update(plan, sampled)
        self.scheduler.observe(plan, 0.01 + 0.001 * plan.num_tokens)
        self._check()
        for sequence in list(self.live.values()):
            if sequence.num_tokens == sequence.max_total_tokens:
                self._remove(sequence.sequence_id)

    def step_with_failing_moves(self, num_steps):
        for _ in range(num_steps):
            self.step(moves_fail=True)

    def drain(self):
        """All that is left must end, in no more steps than if each sequence ran alone and lost its blocks each time."""
        most = sum(sequence.max_total_tokens for sequence in self.live.values()) * (len(self.live) + 1)
        for _ in range(most):
            if not self.live:
                return
            self.step()
        assert not self.live, "the schedule does not end"

    def _fail_moves(self, moves):
        """As the engine does: who would read what was not copied ends, the others go on in the same step."""
        self.kv.spoil(moves)
        filled = {block for _, block in (*moves.from_host, *moves.duplicated)}
        for sequence in list(self.live.values()):
            if not filled.isdisjoint(sequence.block_table):
                self._remove(sequence.sequence_id)
        self.scheduler.drop_cached()

    def _remove(self, sequence_id, *, is_suspect=False):
        if is_suspect:
            self.scheduler.discard(sequence_id)
        else:
            self.scheduler.remove(sequence_id)
        del self.live[sequence_id]
        self.scheduler.check_integrity()

    def _check(self):
        self.scheduler.check_integrity()
        self.kv.check_names(self.scheduler._memory, self.known)
        for sequence in self.live.values():
            self.kv.check(sequence, sequence.block_table, sequence.num_computed_tokens)
        changes = self.scheduler.take_cache_changes()
        assert self.findable.isdisjoint(changes.added)
        assert self.findable.issuperset(changes.removed)
        self.findable = (self.findable | set(changes.added)) - set(changes.removed)
        assert self.findable == {digest_of(name) for name in self.scheduler._memory._findable()}
        assert self.scheduler.num_cached_blocks == len(self.findable)


def next_token(token_ids):
    """Equal contexts go on equally, so that output is shared as well."""
    return (sum(token_ids) + len(token_ids)) % 3


def draw(token_ids, drafts):
    """What counts behind a sequence's tokens: as many as were proposed rightly, and one more."""
    drawn = [next_token(token_ids)]
    for draft in drafts:
        if draft != drawn[-1]:
            break
        drawn.append(next_token([*token_ids, *drawn]))
    return drawn


class GuessedDrafts:
    """Implements `Drafts`: what will be drawn, now and then something else."""

    def __init__(self, guesses):
        self.guesses = guesses
        self.num_accepted = 0
        self.known = set()

    def propose(self, step):
        assert step.room > 0
        proposals = {}
        for sequence, room in step.decoding:
            assert room > 0
            self.known.add(sequence.sequence_id)
            drafts = []
            for _ in range(self.guesses.randrange(12)):
                right = next_token([*sequence.token_ids, *drafts])
                drafts.append(right if self.guesses.random() < 0.8 else (right + 1) % 3)
            proposals[sequence.sequence_id] = drafts
        return proposals

    def record(self, sequence, planned, num_accepted):
        assert 0 <= num_accepted <= planned.num_drafts
        self.num_accepted += num_accepted

    def observe(self, plan, seconds): ...

    def forget(self, sequence_id):
        self.known.discard(sequence_id)


# A few stems, so that prompts share prefixes of several blocks and part in the middle of one.
_stems = st.sampled_from([[1] * 24, [1] * 10 + [2] * 14, [1] * 8 + [2] * 16, [2] * 24, [0, 1, 2] * 8])
_prompts = st.builds(
    lambda stem, length, rest: (stem[:length] + rest) or [0],
    _stems,
    st.one_of(st.sampled_from([8, 16, 24]), st.integers(0, 24)),
    st.one_of(st.just([]), st.lists(st.integers(0, 2), max_size=5)),
)
_adds = st.fixed_dictionaries(
    {
        "prompt": _prompts,
        "output": st.integers(1, 24),
        "priority": st.integers(0, 2),
        "root": st.sampled_from([ROOTS[0], ROOTS[0], ROOTS[0], ROOTS[1], None]),
    }
)
_arrivals = st.tuples(st.just("add"), st.lists(_adds, min_size=1, max_size=6))
_steps = st.tuples(st.just("steps"), st.integers(1, 12))
_troubles = st.one_of(
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("fail"), st.integers(0, 20)),
    st.tuples(st.just("fail moves"), st.integers(1, 12)),
)
_events = st.lists(
    st.one_of(_arrivals, _steps, _arrivals, _steps, _arrivals, _steps, _troubles), min_size=4, max_size=24
)


@st.composite
def _rigs(draw):
    max_running = draw(st.integers(1, 6))
    minimum = draw(st.sampled_from([0.0, 0.0, 0.1]))
    guesses = draw(st.sampled_from([None, 1, 2, 3]))
    return Rig(
        guesses=None if guesses is None else random.Random(guesses),
        num_blocks=draw(st.integers(4, 20)),
        num_host_blocks=draw(st.sampled_from([0, 0, 1, 2, 5, 30])),
        limits=StepLimits(
            max_running=max_running,
            token_budget=max_running + draw(st.integers(0, 40)),
            max_long_prefills=draw(st.integers(1, 2)),
            long_prefill_tokens=draw(st.integers(3, 20)),
            target_step_s=draw(st.sampled_from([None, None, 0.012, 0.02])),
            min_prefill_tokens=draw(st.integers(1, 8)),
            initial_growth_ratio=draw(st.sampled_from([minimum, minimum, 0.5])),
            min_growth_ratio=minimum,
        ),
    )


@settings(max_examples=100, deadline=None)
@given(rig=_rigs(), events=_events)
def test_every_step_of_any_schedule_reads_the_right_blocks_and_every_sequence_ends(rig, events):
    for kind, value in events:
        if kind == "add":
            for spec in value:
                rig.add(**spec)
        elif kind == "abort":
            rig.abort(value)
        elif kind == "fail":
            rig.step(failing=value)
        elif kind == "fail moves":
            rig.step_with_failing_moves(value)
        else:
            for _ in range(value):
                rig.step()
    rig.drain()
    assert rig.scheduler.num_running == rig.scheduler.num_waiting == 0
    rig.scheduler.drop_cached()
    rig._check()
    assert rig.findable == set()
    assert rig.drafts is None or not rig.drafts.known
