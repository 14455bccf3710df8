"""Decides what each step computes. Pure: no torch, no clock, no randomness.

There is no prefill phase and no decode phase (after vLLM's v1 core): each sequence has computed tokens that chase its
total, and a step spends a token budget on them, decodes first, then prefill chunks, in class order and then by arrival. What has waited for long is
raised to the highest class, one sequence at a time.

Full blocks are shared by their prefix hash. A block is published when the step that completed it was computed; a
sequence whose next block is being computed by a running one waits for it, while others pass.

When memory runs out, the last in that order loses its blocks and starts over later from what is still found of them. The
first in the order never loses its blocks, running sequences never wait for others, and no sequence is taken in that could
not run alone, so some sequence always advances.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from operator import attrgetter

from gpu_worker.engine.admission import Admission, AdmissionRule, GrowthRatio
from gpu_worker.engine.aging import Aging
from gpu_worker.engine.block_pool import BlockPool
from gpu_worker.engine.port import CacheChanges
from gpu_worker.engine.sequence import UNKNOWN_TOKEN, Sequence, SequenceState, StepPlan
from gpu_worker.engine.sequence_blocks import SequenceBlocks
from gpu_worker.engine.step_cost import StepCost, attended_by
from gpu_worker.engine.step_draft import StepDraft
from gpu_worker.engine.step_limits import StepLimits
from gpu_worker.engine.waiting import WaitingSequences
from gpu_worker.speculation.port import DraftableStep, Drafts

__all__ = ["NeverFitsError", "StepLimits", "StepScheduler"]

_by_order = attrgetter("order")
# Waiting sequences that a step looks up and passes, because others compute their blocks or too many long prefills run:
# bounds its work. Those behind them have their turn when these wait for blocks, which needs no more looking up.
_MAX_PASSED = 64


class NeverFitsError(Exception):
    """The sequence needs more blocks than there are, even alone."""


class StepScheduler:
    """The waiting and running sequences of one engine and, through the pool, their memory.

    A plan is made by `schedule`, executed (moves first), and recorded by `update` before the next is made. Sequences whose
    part of it failed are removed in between, so that nothing of it is published.
    """

    def __init__(
        self, *, pool: BlockPool, limits: StepLimits, num_host_blocks: int = 0, drafts: Drafts | None = None
    ) -> None:
        self._pool = pool
        self._limits = limits
        self._drafts = drafts
        self._blocks = SequenceBlocks(pool=pool, num_host_blocks=num_host_blocks)
        self._memory = self._blocks.memory
        self._cost = StepCost()
        self._growth = GrowthRatio(initial=limits.initial_growth_ratio, minimum=limits.min_growth_ratio)
        self._admission = AdmissionRule(pool=pool, limits=limits, growth=self._growth, cost=self._cost)
        self._waiting = WaitingSequences()
        self._aging = Aging()
        self._running: list[Sequence] = []
        self._sequences: dict[str, Sequence] = {}
        self._plan = StepPlan(sequences=())
        self._num_arrived = 0
        self.num_preempted = 0
        """Preemptions since the start, as all counters below."""
        self.num_computed_prompt_tokens = 0
        """Tokens computed to fill caches: prompts, output of earlier attempts, what was preempted."""
        self.num_cached_prompt_tokens = 0
        """Tokens found in the cache, whenever a sequence got blocks."""

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV stands in blocks that somebody holds; shared ones count once."""
        block_size = self._pool.block_size
        # Only blocks of one holder have slots that are not computed.
        num_empty = sum(len(other.block_table) * block_size - other.num_computed_tokens for other in self._running)
        return (self._pool.num_blocks - self._pool.num_free) * block_size - num_empty

    @property
    def num_cached_blocks(self) -> int:
        """Contents that can be found by their hash now, host tier included."""
        return self._memory.num_cached_blocks

    @property
    def num_blocks_to_host(self) -> int:
        return self._memory.num_blocks_to_host

    @property
    def num_blocks_from_host(self) -> int:
        return self._memory.num_blocks_from_host

    @property
    def room_blocks(self) -> tuple[int, int, int]:
        """Blocks that a new sequence of class 0, 1, 2 could get: free ones, and those that only lower classes hold,
        without what waits in its own or a higher class, which goes first.
        """

        def room(priority: int) -> int:
            num_owed = self._pool.num_blocks_for(self._waiting.num_tokens_up_to(priority))
            return max(0, self._admission.room_blocks(self._running, priority) - num_owed)

        return (room(0), room(1), room(2))

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence behind its class. Raises NeverFitsError when it could not run even alone."""
        assert sequence.sequence_id not in self._sequences, "sequence ids are unique"
        # The last token a sequence may have is only sampled; its KV is never needed.
        needed = self._pool.num_blocks_for(sequence.max_total_tokens - 1)
        if needed > self._pool.num_blocks:
            raise NeverFitsError(f"needs {needed} KV blocks, the engine has {self._pool.num_blocks}")
        sequence.arrival = self._num_arrived
        self._num_arrived += 1
        self._sequences[sequence.sequence_id] = sequence
        self._waiting.add(sequence)

    def remove(self, sequence_id: str) -> None:
        """Ends a sequence in any state and gives its blocks back at once."""
        sequence = self._sequences.pop(sequence_id)
        self._aging.forget(sequence_id)
        if sequence.state is SequenceState.RUNNING:
            self._stop(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.state = SequenceState.FINISHED
        if self._drafts is not None:
            self._drafts.forget(sequence_id)

    def discard(self, sequence_id: str) -> None:
        """Ends a sequence whose computing went wrong: nobody finds its blocks any more."""
        self._blocks.disown(self._sequences[sequence_id])
        self.remove(sequence_id)

    def schedule(self) -> StepPlan:
        """The next step. Takes blocks for it and preempts as needed; empty only when there is no sequence."""
        draft = StepDraft(limits=self._limits, cost=self._cost)
        self._plan_decodes(draft)
        self._plan_prefills(draft)
        if self._drafts is not None:
            self._plan_drafts(draft, self._drafts)
        self._growth.step(is_short_of_blocks=draft.is_short_of_blocks)
        planned = draft.describe(self._sequences)
        is_waited_for = any(sequence.is_full for sequence in self._running)
        assert planned or is_waited_for or not self._sequences, "a step must advance some sequence"
        self._plan = StepPlan(sequences=planned, preempted=tuple(draft.preempted), moves=self._memory.take_moves())
        return self._plan

    def update(self, plan: StepPlan, sampled: Mapping[str, SequenceOf[int]]) -> None:
        """Records that `plan` was computed, with the tokens drawn for each of its sampled sequences: one, and one more for
        each proposed token that was right. What stands behind them in the plan was not computed.

        Sequences removed since the plan was made are skipped.
        """
        for planned in plan.sequences:
            sequence = self._sequences.get(planned.sequence_id)
            if sequence is None:
                continue
            end = planned.context_length
            self.num_computed_prompt_tokens += max(0, min(end, sequence.num_admitted_tokens) - planned.start)
            sequence.num_computed_tokens = end
            if planned.is_sampled:
                drawn = sampled[planned.sequence_id]
                sequence.num_computed_tokens = end = end - planned.num_sampled_rows + len(drawn)
                sequence.token_ids.extend(drawn)
            self._publish(sequence)
            if planned.num_drafts:
                self._blocks.trim(sequence)
                assert self._drafts is not None
                self._drafts.record(sequence, planned, len(sampled[planned.sequence_id]) - 1)
        self._plan = StepPlan(sequences=())

    def suppose(self, plan: StepPlan) -> None:
        """Takes a plan without drafts, which is being computed, for computed, so that the next can be made: each drawn
        token is UNKNOWN_TOKEN until `confirm` tells it, which comes before any other plan is supposed. Publishes nothing.
        """
        for planned in plan.sequences:
            sequence = self._sequences.get(planned.sequence_id)
            if sequence is not None:
                sequence.num_computed_tokens = planned.context_length
                if planned.is_sampled:
                    sequence.token_ids.append(UNKNOWN_TOKEN)
        self._plan = StepPlan(sequences=())

    def confirm(self, plan: StepPlan, sampled: Mapping[str, SequenceOf[int]]) -> None:
        """Records that a supposed plan was computed, with the token drawn for each of its sampled sequences.

        Sequences removed since then are skipped; of those that have lost their blocks meanwhile nothing is published.
        """
        for planned in plan.sequences:
            sequence = self._sequences.get(planned.sequence_id)
            if sequence is None:
                continue
            end = planned.context_length
            self.num_computed_prompt_tokens += max(0, min(end, sequence.num_admitted_tokens) - planned.start)
            if planned.is_sampled:
                (sequence.token_ids[end],) = sampled[planned.sequence_id]
            if sequence.state is SequenceState.RUNNING:
                self._publish(sequence)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learns how long a plan took to compute, and raises what has waited for too long. Raises ValueError for negative or infinite seconds."""
        self._cost.observe(tokens=plan.num_tokens, attended=attended_by(plan), seconds=seconds)
        self._aging.pass_time(seconds, self._waiting)
        if self._drafts is not None:
            self._drafts.observe(plan, seconds)

    def take_cache_changes(self) -> CacheChanges:
        """What became findable or stopped being so since the last call; what does not fit comes with the next."""
        return self._memory.take_changes()

    def drop_cached(self) -> None:
        """Forgets all content that nobody holds, host tier included.

        For when moves failed: first remove the sequences that hold blocks which the moves were to fill.
        """
        self._memory.drop_unheld()

    def check_integrity(self) -> None:
        """Raises BlockAccountingError or AssertionError unless blocks, names, tables and states agree."""
        self._blocks.check_integrity(self._sequences.values(), self._plan)
        assert self._running == sorted(self._running, key=_by_order), "running sequences are out of order"
        self._waiting.check_integrity()
        assert len(self._running) + len(self._waiting) == len(self._sequences)
        for sequence in self._sequences.values():
            is_running = sequence.state is SequenceState.RUNNING
            assert is_running == (sequence in self._running) != (sequence in self._waiting)

    def _plan_decodes(self, draft: StepDraft) -> None:
        for sequence in self._running.copy():
            if draft.budget == 0:
                return
            is_due = sequence.is_decoding and not sequence.is_full and sequence.state is SequenceState.RUNNING
            if is_due and self._grow(sequence, sequence.num_tokens, draft):
                draft.extend_decode(sequence)

    def _plan_prefills(self, draft: StepDraft) -> None:
        prefilling = [sequence for sequence in self._running if not sequence.is_decoding and not sequence.is_full]
        begun: list[Sequence] = []
        for sequence in self._in_order(prefilling, draft):
            if draft.budget == 0:
                return
            if sequence.state is SequenceState.RUNNING or self._take_in(sequence, draft):
                self._extend_prefill(sequence, self._limits.long_prefill_tokens, draft)
                begun.append(sequence)
        for sequence in begun:
            if draft.budget > 0 and sequence.state is SequenceState.RUNNING:
                self._extend_prefill(sequence, draft.budget, draft)

    def _plan_drafts(self, draft: StepDraft, drafts: Drafts) -> None:
        """Proposed tokens behind the newest ones, of what the others leave of budget and free blocks."""
        decoding = [
            (sequence, sequence.max_total_tokens - 1 - sequence.num_tokens)
            for sequence in self._running
            if sequence.is_decoding and draft.chunks.get(sequence.sequence_id)
        ]
        decoding = [(sequence, room) for sequence, room in decoding if room > 0]
        if not decoding or draft.budget == 0:
            return
        step = DraftableStep(
            decoding=tuple(decoding),
            num_rows=self._limits.token_budget - draft.budget,
            room=draft.budget,
            target_s=self._limits.target_step_s,
        )
        proposals = drafts.propose(step)
        for sequence, room in decoding:
            num_slots = (len(sequence.block_table) + self._pool.num_free) * self._pool.block_size
            most = min(room, draft.budget, num_slots - sequence.num_tokens)
            token_ids = tuple(proposals.get(sequence.sequence_id, ()))[:most]
            if token_ids and self._grow(sequence, sequence.num_tokens + len(token_ids), draft):
                draft.extend_proposed(sequence, token_ids)

    def _in_order(self, prefilling: list[Sequence], draft: StepDraft) -> Iterator[Sequence]:
        """Running prefills and waiting sequences; without the latter as soon as admission is closed.

        Those that lost their blocks to this plan are left out.
        """
        waiting = filter(lambda other: other.sequence_id not in draft.preempted, self._waiting)
        newcomer = next(waiting, None)
        for sequence in prefilling:
            while newcomer is not None and not draft.is_admission_closed and newcomer.order < sequence.order:
                yield newcomer
                newcomer = next(waiting, None)
            if sequence.state is SequenceState.RUNNING:
                yield sequence
        while newcomer is not None and not draft.is_admission_closed:
            yield newcomer
            newcomer = next(waiting, None)

    def _take_in(self, sequence: Sequence, draft: StepDraft) -> bool:
        """Makes a waiting sequence running unless it has to wait for a block, its turn, time or memory."""
        if self._blocks.still_waits(sequence):
            return False
        if draft.num_passed == _MAX_PASSED:
            draft.is_admission_closed = True
            return False
        found = self._blocks.find(sequence)
        if self._blocks.starts_to_wait(sequence, found):
            draft.num_passed += 1
            return False
        num_found = self._blocks.num_found_tokens(sequence, found)
        if self._limits.is_long(sequence.num_tokens - num_found):
            # Lower classes do not count: they get what the others leave of a step, and would keep their places for long.
            rivals = (other for other in self._running if other.priority <= sequence.priority)
            num_long = sum(self._limits.is_long(other.num_uncomputed_tokens) for other in rivals)
            if num_long >= self._limits.max_long_prefills:
                draft.num_passed += 1
                return False
        admission = None
        if draft.room_for_prefill(num_found, 1) > 0:
            admission = self._admission.decide(sequence, found, self._running)
        if admission is None:
            # Nobody overtakes a sequence that waits for memory, or large ones would wait for ever.
            draft.is_admission_closed = True
            return False
        self._admit(sequence, found[: admission.num_found], admission, draft)
        return True

    def _admit(self, sequence: Sequence, found: list[int | None], admission: Admission, draft: StepDraft) -> None:
        for victim in admission.victims:
            self._preempt(victim, draft)
        self._blocks.attach(sequence, found, is_last_private=admission.is_last_private)
        self.num_cached_prompt_tokens += sequence.num_computed_tokens
        if sequence.state is SequenceState.WAITING:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        sequence.state = SequenceState.RUNNING
        self._waiting.remove(sequence)
        insort(self._running, sequence, key=_by_order)
        draft.admitted.add(sequence.sequence_id)

    def _extend_prefill(self, sequence: Sequence, most: int, draft: StepDraft) -> None:
        start = draft.end_of(sequence)
        num_tokens = draft.room_for_prefill(start, min(sequence.num_tokens - start, most))
        if num_tokens > 0 and self._grow(sequence, start + num_tokens, draft):
            draft.extend_prefill(sequence, num_tokens)

    def _grow(self, sequence: Sequence, num_tokens: int, draft: StepDraft) -> bool:
        """Gets blocks for so many tokens, from the last in order when none are free; False when that is itself."""
        num_missing = self._pool.num_blocks_for(num_tokens) - len(sequence.block_table)
        if num_missing <= 0:
            return True
        while num_missing > self._pool.num_free:
            draft.is_short_of_blocks = True
            victim = self._running[-1]
            self._preempt(victim, draft)
            if victim is sequence:
                return False
        self._blocks.grow(sequence, num_missing)
        return True

    def _preempt(self, victim: Sequence, draft: StepDraft) -> None:
        draft.preempt(victim)
        self._stop(victim)
        victim.state = SequenceState.PREEMPTED
        self._waiting.add(victim)
        self.num_preempted += 1

    def _publish(self, sequence: Sequence) -> None:
        if sequence.num_computed_tokens >= (sequence.num_published_blocks + 1) * self._pool.block_size:
            self._blocks.publish(sequence)

    def _stop(self, sequence: Sequence) -> None:
        _take_out(self._running, sequence)
        self._blocks.detach(sequence)


def _take_out(ordered: list[Sequence], sequence: Sequence) -> None:
    index = bisect_left(ordered, sequence.order, key=_by_order)
    assert ordered[index] is sequence
    del ordered[index]
