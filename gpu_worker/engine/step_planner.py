"""Who computes how much in the next step. Pure: no torch, no clock, no randomness.

There is no prefill phase and no decode phase (after vLLM's v1 core): each sequence has computed tokens that chase its
total, and a step spends a token budget on them, decodes first, then prefill chunks, in class order and then by arrival;
proposed tokens get what is left.

A sequence whose next block is being computed by a running one waits for it, while others pass. When memory runs out, the last
in order loses its blocks and starts over later from what is still found of them. The first in the order never loses its
blocks, running sequences never wait for others, and no sequence is taken in that could not run alone, so some sequence always
advances.
"""

from collections.abc import Iterator

from gpu_worker.engine.admission import Admission, AdmissionRule, GrowthRatio
from gpu_worker.engine.batch import Batch
from gpu_worker.engine.sequence import Sequence, SequenceState
from gpu_worker.engine.step_cost import StepCost
from gpu_worker.engine.step_draft import StepDraft
from gpu_worker.engine.step_limits import StepLimits
from gpu_worker.speculation.port import DraftableStep, Drafts

# Waiting sequences that a step looks up and passes, because others compute their blocks or too many long prefills run:
# bounds its work. Those behind them have their turn when these wait for blocks, which needs no more looking up.
_MAX_PASSED = 64


class StepPlanner:
    """Plans steps over a batch, and gives and takes blocks and places as it does."""

    def __init__(self, *, batch: Batch, limits: StepLimits, cost: StepCost, drafts: Drafts | None) -> None:
        self._batch = batch
        self._pool = batch.pool
        self._block_size = batch.pool.block_size
        self._blocks = batch.blocks
        self._limits = limits
        self._cost = cost
        self._drafts = drafts
        self._growth = GrowthRatio(initial=limits.initial_growth_ratio, minimum=limits.min_growth_ratio)
        self._admission = AdmissionRule(pool=batch.pool, limits=limits, growth=self._growth, cost=cost)

    def plan(self) -> StepDraft:
        """What the next step computes; empty only when no sequence has anything to compute."""
        draft = StepDraft(limits=self._limits, cost=self._cost)
        self._plan_decodes(draft)
        self._plan_prefills(draft)
        if self._drafts is not None:
            self._plan_drafts(draft, self._drafts)
        self._growth.step(is_short_of_blocks=draft.is_short_of_blocks)
        return draft

    def room_blocks(self, priority: int) -> int:
        """Blocks that a new sequence of that class could get: free ones, and those that only lower classes hold, without
        what waits in its own or a higher class, which goes first."""
        num_owed = self._pool.num_blocks_for(self._batch.waiting.num_tokens_up_to(priority))
        return max(0, self._admission.room_blocks(self._batch.running, priority) - num_owed)

    def _plan_decodes(self, draft: StepDraft) -> None:
        for sequence in self._batch.running.copy():
            if draft.budget == 0:
                return
            is_due = sequence.is_decoding and not sequence.is_full and sequence.state is SequenceState.RUNNING
            if is_due and self._grow(sequence, sequence.num_tokens, draft):
                draft.extend_decode(sequence)

    def _plan_prefills(self, draft: StepDraft) -> None:
        # What decodes in this step stands in the draft already, which is the quickest to see.
        prefilling = [
            other
            for other in self._batch.running
            if other.sequence_id not in draft.chunks and not other.is_decoding and not other.is_full
        ]
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
            for sequence in self._batch.running
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
        waiting = filter(lambda other: other.sequence_id not in draft.preempted, self._batch.waiting)
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
            rivals = (other for other in self._batch.running if other.priority <= sequence.priority)
            num_long = sum(self._limits.is_long(other.num_uncomputed_tokens) for other in rivals)
            if num_long >= self._limits.max_long_prefills:
                draft.num_passed += 1
                return False
        admission = None
        if draft.room_for_prefill(num_found, 1) > 0:
            admission = self._admission.decide(sequence, found, self._batch.running)
        if admission is None:
            # Nobody overtakes a sequence that waits for memory, or large ones would wait for ever.
            draft.is_admission_closed = True
            return False
        self._admit(sequence, found, admission, draft)
        return True

    def _admit(self, sequence: Sequence, found: list[int | None], admission: Admission, draft: StepDraft) -> None:
        for victim in admission.victims:
            self._preempt(victim, draft)
        used = found[: admission.num_found]
        self._batch.start(sequence, used, is_last_private=admission.is_last_private)
        draft.admitted.add(sequence.sequence_id)

    def _extend_prefill(self, sequence: Sequence, most: int, draft: StepDraft) -> None:
        start = draft.end_of(sequence)
        num_tokens = draft.room_for_prefill(start, min(sequence.num_tokens - start, most))
        if num_tokens > 0 and self._grow(sequence, start + num_tokens, draft):
            draft.extend_prefill(sequence, num_tokens)

    def _grow(self, sequence: Sequence, num_tokens: int, draft: StepDraft) -> bool:
        """Gets blocks for so many tokens, from the last in order when none are free; False when that is itself."""
        if num_tokens <= len(sequence.block_table) * self._block_size:
            return True
        num_missing = self._pool.num_blocks_for(num_tokens) - len(sequence.block_table)
        while num_missing > self._pool.num_free:
            draft.is_short_of_blocks = True
            victim = self._batch.running[-1]
            self._preempt(victim, draft)
            if victim is sequence:
                return False
        self._blocks.grow(sequence, num_missing)
        return True

    def _preempt(self, victim: Sequence, draft: StepDraft) -> None:
        draft.preempt(victim)
        self._batch.preempt(victim)
