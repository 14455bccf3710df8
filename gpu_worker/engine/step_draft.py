"""A step's plan while it is made: tokens per sequence, and what is left of its bounds. Pure."""

from collections.abc import Mapping

from gpu_worker.engine.sequence import PlannedSequence, Sequence
from gpu_worker.engine.step_cost import StepCost, attended_positions
from gpu_worker.engine.step_limits import StepLimits


class StepDraft:
    """Owned by one call of `StepScheduler.schedule`."""

    def __init__(self, *, limits: StepLimits, cost: StepCost) -> None:
        self._limits = limits
        self._cost = cost
        self._num_attended = 0
        self._has_prefill = False
        self.budget = limits.token_budget
        self.chunks: dict[str, int] = {}
        self.proposed: dict[str, tuple[int, ...]] = {}
        """Tokens to be verified behind those of `chunks`."""
        self.preempted: dict[str, None] = {}
        self.admitted: set[str] = set()
        self.is_admission_closed = False
        self.num_passed = 0
        self.is_short_of_blocks = False

    def extend_decode(self, sequence: Sequence) -> None:
        self.chunks[sequence.sequence_id] = 1
        self.budget -= 1
        self._num_attended += sequence.num_computed_tokens + 1

    def extend_prefill(self, sequence: Sequence, num_tokens: int) -> None:
        start = self.end_of(sequence)
        self._has_prefill = True
        self.chunks[sequence.sequence_id] = start - sequence.num_computed_tokens + num_tokens
        self.budget -= num_tokens
        self._num_attended += attended_positions(start, num_tokens)

    def extend_proposed(self, sequence: Sequence, token_ids: tuple[int, ...]) -> None:
        """Behind the token of a sequence that decodes; nothing is preempted afterwards."""
        self.proposed[sequence.sequence_id] = token_ids
        self.budget -= len(token_ids)
        self._num_attended += attended_positions(self.end_of(sequence), len(token_ids))

    def preempt(self, sequence: Sequence) -> None:
        """Takes a sequence out of the plan; to be called while it still knows what it had computed."""
        assert sequence.sequence_id not in self.admitted, "what came in with this plan stays in it"
        num_tokens = self.chunks.pop(sequence.sequence_id, 0)
        self.budget += num_tokens
        self._num_attended -= attended_positions(sequence.num_computed_tokens, num_tokens)
        self.preempted[sequence.sequence_id] = None

    def end_of(self, sequence: Sequence) -> int:
        """Where the sequence's next token in this plan stands."""
        return sequence.num_computed_tokens + self.chunks.get(sequence.sequence_id, 0)

    def describe(self, sequences: Mapping[str, Sequence]) -> tuple[PlannedSequence, ...]:
        """The draft as plain data."""
        return tuple(
            _describe(sequences[sequence_id], chunk, self.proposed.get(sequence_id, ()))
            for sequence_id, chunk in self.chunks.items()
        )

    def room_for_prefill(self, start: int, wanted: int) -> int:
        """How many of `wanted` tokens behind `start` others fit into the step."""
        most = min(wanted, self.budget)
        if self._limits.target_step_s is None or most <= 0 or self._is_within_target(start, most):
            return most
        least = 0 if self._has_prefill else min(most, self._limits.min_prefill_tokens)
        # The predicted time grows with the chunk: `fits` does, `most` does not.
        fits = 0
        while most - fits > 1:
            middle = (fits + most) // 2
            fits, most = (middle, most) if self._is_within_target(start, middle) else (fits, middle)
        return max(fits, least)

    def _is_within_target(self, start: int, num_tokens: int) -> bool:
        assert self._limits.target_step_s is not None
        seconds = self._cost.predict(
            tokens=self._limits.token_budget - self.budget + num_tokens,
            attended=self._num_attended + attended_positions(start, num_tokens),
        )
        # Before the first step nothing is known; the least prefill finds out.
        return seconds is not None and seconds <= self._limits.target_step_s


def _describe(sequence: Sequence, num_tokens: int, proposed: tuple[int, ...]) -> PlannedSequence:
    start = sequence.num_computed_tokens
    end = start + num_tokens
    return PlannedSequence(
        sequence_id=sequence.sequence_id,
        start=start,
        token_ids=(*sequence.token_ids[start:end], *proposed),
        block_table=tuple(sequence.block_table),
        is_sampled=end == len(sequence.token_ids),
        num_drafts=len(proposed),
    )
