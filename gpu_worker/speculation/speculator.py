"""Decides in each step whether proposing pays, and keeps the counts. Pure; the timer is injected.

It pays when the tokens that are expected to be right are worth more than the rows that verify them: both are measured, the
former by the proposer, the latter step by step. While it does not pay, nothing is verified, and looking for proposals is
held to a small share of the time.
"""

import time
from collections.abc import Callable

from gpu_worker.engine.sequence import PlannedSequence, StepPlan
from gpu_worker.engine.sequence import Sequence as ScheduledSequence
from gpu_worker.speculation.choice import StepPrice, choose
from gpu_worker.speculation.port import DraftableStep, DraftCounts, Proposals, RequestBehind
from gpu_worker.speculation.proposer import Proposer
from gpu_worker.speculation.row_cost import RowCost

# Far enough from 1 that errors of what is expected do not make a large batch slower, where little can be gained.
_GAIN_TO_START = 1.12
_GAIN_TO_GO_ON = 1.06
_PLAIN_STEP_EVERY = 64
_MAX_IDLE_SHARE = 0.005
_NO_PROPOSALS: Proposals = {}


class Speculator:
    """Implements `Drafts` over a proposer."""

    def __init__(
        self,
        proposer: Proposer,
        cost: RowCost,
        *,
        max_draft_tokens: int,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._proposer = proposer
        self._cost = cost
        self._max_draft_tokens = max_draft_tokens
        self._timer = timer
        self._is_on = False
        self._num_on = 0
        self._idle_debt_s = 0.0
        self._num_steps = self._num_proposed = self._num_accepted = self._num_stops = 0

    @property
    def counts(self) -> DraftCounts:
        return DraftCounts(
            num_steps=self._num_steps,
            num_proposed=self._num_proposed,
            num_accepted=self._num_accepted,
            is_on=self._is_on,
            num_stops=self._num_stops,
        )

    def bind(self, request_behind: RequestBehind) -> None:
        """To be called once, by the engine that draws."""
        self._proposer.bind(request_behind)

    def propose(self, step: DraftableStep) -> Proposals:
        if not self._is_on and self._idle_debt_s > 0:
            return _NO_PROPOSALS
        started = self._timer()
        proposals = self._propose(step)
        if not proposals:
            self._idle_debt_s += self._timer() - started
        return proposals

    def record(self, sequence: ScheduledSequence, planned: PlannedSequence, num_accepted: int) -> None:
        self._num_steps += 1
        self._num_proposed += planned.num_drafts
        self._num_accepted += num_accepted
        self._proposer.record(sequence, planned.num_drafts, num_accepted)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        self._idle_debt_s = max(0.0, self._idle_debt_s - _MAX_IDLE_SHARE * seconds)
        is_decode = all(len(planned.token_ids) == planned.num_sampled_rows for planned in plan.sequences)
        if is_decode and seconds > 0:
            self._cost.observe(plan.num_tokens, seconds)

    def forget(self, sequence_id: str) -> None:
        self._proposer.forget(sequence_id)

    def _propose(self, step: DraftableStep) -> Proposals:
        offers = self._proposer.offer(step.decoding, self._max_draft_tokens)
        if not any(offers):
            return _NO_PROPOSALS
        price = StepPrice(seconds=self._cost.predict, propose_seconds=self._proposer.seconds, target_s=step.target_s)
        choice = choose(offers, num_rows=step.num_rows, most=step.room, price=price)
        self._switch(is_on=choice.gain >= (_GAIN_TO_GO_ON if self._is_on else _GAIN_TO_START))
        if not self._is_on:
            return _NO_PROPOSALS
        self._num_on += 1
        if self._num_on % _PLAIN_STEP_EVERY == 0:
            # What a step without proposals takes has to stay known.
            return _NO_PROPOSALS
        counts = {
            sequence.sequence_id: count
            for (sequence, _), count in zip(step.decoding, choice.counts, strict=True)
            if count
        }
        proposals = self._proposer.propose(counts)
        if self._proposer.has_failed:
            self._switch(is_on=False)
        return proposals

    def _switch(self, *, is_on: bool) -> None:
        self._num_stops += self._is_on and not is_on
        self._is_on = is_on
