"""Decides what each step computes. Pure: no torch, no clock, no randomness.

There is no prefill phase and no decode phase (after vLLM's v1 core): each sequence has computed tokens that chase its
total, and a step spends a token budget on them, decodes first, then prefill chunks, in class order and then by arrival.

When memory runs out, the last in that order loses its blocks and starts over later from its tokens. The first in the order
never loses its blocks, and no sequence is taken in that could not run alone, so some sequence always advances.
"""

from bisect import insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import merge
from operator import attrgetter

from gpu_worker.engine.block_pool import BlockPool
from gpu_worker.engine.sequence import PlannedSequence, Sequence, SequenceState, StepPlan

_by_order = attrgetter("order")


class NeverFitsError(Exception):
    """The sequence needs more blocks than there are, even alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Bounds of one step.

    max_running: sequences that hold blocks. token_budget: tokens computed per step, at least max_running so that a full
    batch decodes in one step. A prefill of more than long_prefill_tokens is long: at most max_long_prefills are taken in
    at a time, and each gets more than long_prefill_tokens of a step only when nobody else wants the rest.
    """

    max_running: int
    token_budget: int
    max_long_prefills: int
    long_prefill_tokens: int

    def __post_init__(self) -> None:
        for name in ("max_running", "max_long_prefills", "long_prefill_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.token_budget < self.max_running:
            raise ValueError("token_budget must be at least max_running")


@dataclass(slots=True)
class _Draft:
    """The plan while it is made: tokens per sequence, and what is left of the budget."""

    budget: int
    chunks: dict[str, int] = field(default_factory=dict)
    preempted: dict[str, None] = field(default_factory=dict)
    is_admission_closed: bool = False

    def extend(self, sequence_id: str, num_tokens: int) -> None:
        self.chunks[sequence_id] = self.chunks.get(sequence_id, 0) + num_tokens
        self.budget -= num_tokens

    def preempt(self, sequence_id: str) -> None:
        self.budget += self.chunks.pop(sequence_id, 0)
        self.preempted[sequence_id] = None


class StepScheduler:
    """The waiting and running sequences of one engine and, through the pool, their memory."""

    def __init__(self, *, pool: BlockPool, limits: StepLimits) -> None:
        self._pool = pool
        self._limits = limits
        self._waiting: list[Sequence] = []
        self._running: dict[str, Sequence] = {}
        self._sequences: dict[str, Sequence] = {}
        self._num_arrived = 0
        self._num_preempted = 0
        # Kept free when a sequence joins others, so that their growth does not throw it out again at once.
        self._watermark = max(1, pool.num_blocks // 100)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_preempted(self) -> int:
        """Preemptions since the start."""
        return self._num_preempted

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV stands in allocated blocks."""
        return sum(sequence.num_computed_tokens for sequence in self._running.values())

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
        insort(self._waiting, sequence, key=_by_order)

    def remove(self, sequence_id: str) -> None:
        """Ends a sequence in any state and gives its blocks back at once."""
        sequence = self._sequences.pop(sequence_id)
        if self._running.pop(sequence_id, None) is None:
            self._waiting.remove(sequence)
        sequence.state = SequenceState.FINISHED
        self._release(sequence)

    def schedule(self) -> StepPlan:
        """The next step. Takes blocks for it and preempts as needed; empty only when there is no sequence."""
        draft = _Draft(budget=self._limits.token_budget)
        self._plan_decodes(draft)
        self._plan_prefills(draft)
        planned = tuple(self._describe(self._running[name], chunk) for name, chunk in draft.chunks.items())
        assert planned or not self._sequences, "a step must advance some sequence"
        return StepPlan(sequences=planned, preempted=tuple(draft.preempted))

    def update(self, plan: StepPlan, sampled: Mapping[str, int]) -> None:
        """Records that `plan` was computed, with the token drawn for each of its sampled sequences.

        Sequences removed since the plan was made are skipped.
        """
        for planned in plan.sequences:
            sequence = self._running.get(planned.sequence_id)
            if sequence is None:
                continue
            sequence.num_computed_tokens = planned.context_length
            if planned.is_sampled:
                sequence.token_ids.append(sampled[planned.sequence_id])

    def check_integrity(self) -> None:
        """Raises BlockAccountingError or AssertionError unless blocks and states agree."""
        self._pool.check_integrity()
        held: dict[int, int] = {}
        for sequence in self._sequences.values():
            assert (sequence.sequence_id in self._running) == (sequence.state is SequenceState.RUNNING)
            assert sequence.num_computed_tokens <= len(sequence.block_table) * self._pool.block_size
            for block in sequence.block_table:
                held[block] = held.get(block, 0) + 1
        for block in range(self._pool.num_blocks):
            assert self._pool.num_references(block) == held.get(block, 0), f"block {block} leaks"

    def _plan_decodes(self, draft: _Draft) -> None:
        for sequence in self._running_in_order():
            if draft.budget == 0:
                return
            if sequence.is_decoding and sequence.state is SequenceState.RUNNING:
                self._extend(sequence, 1, draft)

    def _plan_prefills(self, draft: _Draft) -> None:
        prefilling = [sequence for sequence in self._running_in_order() if not sequence.is_decoding]
        for sequence in merge(prefilling, self._waiting.copy(), key=_by_order):
            if draft.budget == 0:
                return
            if self._may_prefill(sequence, draft):
                wanted = min(sequence.num_uncomputed_tokens, self._limits.long_prefill_tokens)
                self._extend(sequence, min(wanted, draft.budget), draft)
        for sequence_id in list(draft.chunks):
            if sequence_id in draft.chunks:  # not preempted by one before it
                rest = self._running[sequence_id].num_uncomputed_tokens - draft.chunks[sequence_id]
                self._extend(self._running[sequence_id], min(rest, draft.budget), draft)

    def _may_prefill(self, sequence: Sequence, draft: _Draft) -> bool:
        if sequence.state is SequenceState.RUNNING:
            return True
        if draft.is_admission_closed or sequence.sequence_id in draft.preempted:
            return False
        if (
            self._is_long(sequence)
            and sum(map(self._is_long, self._running.values())) >= self._limits.max_long_prefills
        ):
            return False
        # Nobody overtakes a sequence that waits for memory, or large ones would wait for ever.
        draft.is_admission_closed = not self._admit(sequence, draft)
        return not draft.is_admission_closed

    def _admit(self, sequence: Sequence, draft: _Draft) -> bool:
        """Makes a waiting sequence running if all its known tokens fit, at the expense of lower classes if need be."""
        victims: list[Sequence] = []
        for candidate in [None, *reversed(list(self._running_in_order()))]:
            if candidate is not None:
                if candidate.priority <= sequence.priority:
                    return False
                victims.append(candidate)
            if self._has_room(sequence, victims):
                break
        else:
            return False
        for victim in victims:
            self._preempt(victim, draft)
        self._waiting.remove(sequence)
        sequence.state = SequenceState.RUNNING
        self._running[sequence.sequence_id] = sequence
        return True

    def _has_room(self, sequence: Sequence, victims: list[Sequence]) -> bool:
        """Whether `sequence` fits beside the running ones but for `victims`, all counted with their known tokens."""
        stays = [other for other in self._running.values() if other not in victims]
        needed = sum(self._pool.num_blocks_for(other.num_tokens) - len(other.block_table) for other in stays)
        needed += self._pool.num_blocks_for(sequence.num_tokens) + (self._watermark if stays else 0)
        free = self._pool.num_free + sum(len(victim.block_table) for victim in victims)
        return len(stays) < self._limits.max_running and needed <= free

    def _extend(self, sequence: Sequence, num_tokens: int, draft: _Draft) -> None:
        """Adds tokens of a running sequence to the plan, taking blocks from the last in order when none are free."""
        end = sequence.num_computed_tokens + draft.chunks.get(sequence.sequence_id, 0) + num_tokens
        num_missing = self._pool.num_blocks_for(end) - len(sequence.block_table)
        while num_missing > self._pool.num_free:
            victim = max(self._running.values(), key=_by_order)
            self._preempt(victim, draft)
            if victim is sequence:
                return
        if num_missing > 0:
            sequence.block_table += self._pool.allocate(num_missing)
        if num_tokens:
            draft.extend(sequence.sequence_id, num_tokens)

    def _preempt(self, victim: Sequence, draft: _Draft) -> None:
        del self._running[victim.sequence_id]
        self._release(victim)
        victim.state = SequenceState.PREEMPTED
        insort(self._waiting, victim, key=_by_order)
        draft.preempt(victim.sequence_id)
        self._num_preempted += 1

    def _release(self, sequence: Sequence) -> None:
        self._pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed_tokens = 0

    def _is_long(self, sequence: Sequence) -> bool:
        return sequence.num_uncomputed_tokens > self._limits.long_prefill_tokens

    def _running_in_order(self) -> Iterator[Sequence]:
        return iter(sorted(self._running.values(), key=_by_order))

    def _describe(self, sequence: Sequence, num_tokens: int) -> PlannedSequence:
        start = sequence.num_computed_tokens
        return PlannedSequence(
            sequence_id=sequence.sequence_id,
            start=start,
            token_ids=tuple(sequence.token_ids[start : start + num_tokens]),
            block_table=tuple(sequence.block_table),
            is_sampled=start + num_tokens == sequence.num_tokens,
        )
