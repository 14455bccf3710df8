"""What each step computes, and what became of it. Pure: no torch, no clock, no randomness.

`StepPlanner` decides, `Batch` holds who runs and who waits. Here a plan becomes plain data, and what it computed is recorded.

Full blocks are shared by their prefix hash. A block is published when the step that completed it was computed. What has waited
for long is raised to the highest class, one sequence at a time.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from gpu_worker.engine.aging import Aging
from gpu_worker.engine.batch import Batch, NeverFitsError
from gpu_worker.engine.block_pool import BlockPool
from gpu_worker.engine.port import CacheChanges
from gpu_worker.engine.sequence import UNKNOWN_TOKEN, Sequence, SequenceState, StepPlan
from gpu_worker.engine.step_cost import StepCost, attended_by
from gpu_worker.engine.step_limits import StepLimits
from gpu_worker.engine.step_planner import StepPlanner
from gpu_worker.speculation.port import Drafts

__all__ = ["NeverFitsError", "StepLimits", "StepScheduler"]


class StepScheduler:
    """The waiting and running sequences of one engine and, through the pool, their memory.

    A plan is made by `schedule`, executed (moves first), and recorded by `update` before the next is made. Sequences whose
    part of it failed are removed in between, so that nothing of it is published.
    """

    def __init__(
        self, *, pool: BlockPool, limits: StepLimits, num_host_blocks: int = 0, drafts: Drafts | None = None
    ) -> None:
        self._block_size = pool.block_size
        self._drafts = drafts
        self._batch = Batch(pool=pool, num_host_blocks=num_host_blocks)
        self._sequences = self._batch.by_id
        self._blocks = self._batch.blocks
        self._memory = self._blocks.memory
        self._cost = StepCost()
        self._planner = StepPlanner(batch=self._batch, limits=limits, cost=self._cost, drafts=drafts)
        self._aging = Aging()
        self._plan = StepPlan(sequences=())
        self.num_computed_prompt_tokens = 0
        """Tokens computed since the start to fill caches: prompts, output of earlier attempts, what was preempted."""

    @property
    def num_running(self) -> int:
        return len(self._batch.running)

    @property
    def num_waiting(self) -> int:
        return len(self._batch.waiting)

    @property
    def num_computed_tokens(self) -> int:
        """As `Batch` has it."""
        return self._batch.num_computed_tokens

    @property
    def num_preempted(self) -> int:
        """Since the start, as all counters here."""
        return self._batch.num_preempted

    @property
    def num_cached_prompt_tokens(self) -> int:
        """Tokens found in the cache, whenever a sequence got blocks."""
        return self._batch.num_found_tokens

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
        """Of class 0, 1, 2, as `StepPlanner.room_blocks` has it."""
        return (self._planner.room_blocks(0), self._planner.room_blocks(1), self._planner.room_blocks(2))

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence behind its class. Raises NeverFitsError when it could not run even alone."""
        self._batch.add(sequence)

    def remove(self, sequence_id: str) -> None:
        """Ends a sequence in any state and gives its blocks back at once."""
        self._batch.remove(sequence_id)
        self._aging.forget(sequence_id)
        if self._drafts is not None:
            self._drafts.forget(sequence_id)

    def discard(self, sequence_id: str) -> None:
        """Ends a sequence whose computing went wrong: nobody finds its blocks any more."""
        self._blocks.disown(self._sequences[sequence_id])
        self.remove(sequence_id)

    def schedule(self) -> StepPlan:
        """The next step. Takes blocks for it and preempts as needed; empty only when there is no sequence."""
        draft = self._planner.plan()
        planned = draft.describe(self._sequences)
        is_idle = not planned and not any(sequence.is_full for sequence in self._batch.running)
        assert not (is_idle and self._sequences), "a step must advance some sequence"
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
            if planned.start < sequence.num_admitted_tokens:
                self.num_computed_prompt_tokens += min(end, sequence.num_admitted_tokens) - planned.start
            if planned.is_sampled:
                drawn = sampled[planned.sequence_id]
                end += len(drawn) - planned.num_sampled_rows
                sequence.token_ids.extend(drawn)
            sequence.num_computed_tokens = end
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
        """Learns how long a plan took to compute, and raises what has waited for too long to the highest class. Raises
        ValueError for negative or infinite seconds."""
        self._cost.observe(tokens=plan.num_tokens, attended=attended_by(plan), seconds=seconds)
        self._aging.pass_time(seconds, self._batch.waiting)
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
        self._batch.check_integrity(self._plan)

    def _publish(self, sequence: Sequence) -> None:
        if sequence.num_computed_tokens >= (sequence.num_published_blocks + 1) * self._block_size:
            self._blocks.publish(sequence)
