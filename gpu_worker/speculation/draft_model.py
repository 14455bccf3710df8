"""Proposes what a smaller model of the same vocabulary would draw (after Leviathan et al. 2023 and Chen et al. 2023).

It draws with the parameters of the request and the random number of the position, as the target will: where the two
distributions agree, so do the tokens, sampled or greedy. Its KV memory is its own and is rolled back by itself.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import structlog

from gpu_worker.engine.block_pool import BlockPool
from gpu_worker.engine.execution import Executor, Sampled, SampleRequest
from gpu_worker.engine.sequence import PlannedSequence, StepPlan
from gpu_worker.engine.sequence import Sequence as ScheduledSequence
from gpu_worker.speculation.acceptance import AcceptanceBook
from gpu_worker.speculation.draft_contexts import DraftContext, DraftContexts
from gpu_worker.speculation.port import RequestBehind
from gpu_worker.speculation.proposer import Rates
from gpu_worker.speculation.row_cost import RowCost
from service_kit.sampling import SamplingParams

_PRIOR = (0.7,)
_HOPEFUL = 0.9
_PROBE_EVERY = 256
_CATCH_UP_TOKENS = 512
"""Tokens of prompts that one step computes at most before it proposes."""
_WRITTEN_OFF_OVER = 16
"""Steps over which the computing of a prompt is expected to pay for itself."""
_MAX_CATCH_UP_SHARE = 0.1
"""Of the draft model's time for one token after another, as many as a sequence may still get: a prompt that takes longer to
compute is not worth it, however good the proposals are."""

log = structlog.get_logger()


@dataclass(slots=True, kw_only=True)
class _Proposal:
    """What is proposed for one sequence, while it grows."""

    sequence: ScheduledSequence
    context: DraftContext
    count: int
    due: tuple[int, ...]
    """Tokens to compute next."""
    token_ids: list[int] = field(default_factory=list)

    @property
    def is_sampled(self) -> bool:
        """Whether the due tokens reach the end of what is known and proposed."""
        return self.context.num_computed + len(self.due) == self.sequence.num_tokens + len(self.token_ids)


class DraftModelProposer:
    """Implements `Proposer` over an executor with KV memory of `pool`."""

    def __init__(
        self,
        executor: Executor,
        *,
        pool: BlockPool,
        context_length: int,
        cost: RowCost,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._executor = executor
        self._context_length = context_length
        self._cost = cost
        self._timer = timer
        self._book = AcceptanceBook(_PRIOR)
        self._contexts = DraftContexts(pool)
        self._samplings: dict[str, SamplingParams] = {}
        self._sequences: dict[str, ScheduledSequence] = {}
        self._request_behind: RequestBehind | None = None
        # The first step is a trial.
        self._num_idle = _PROBE_EVERY - 1
        self._num_missing = 0
        self.has_failed = False

    def bind(self, request_behind: RequestBehind) -> None:
        self._request_behind = request_behind

    def offer(self, decoding: Sequence[tuple[ScheduledSequence, int]], most: int) -> list[Rates]:
        if self.has_failed:
            return [()] * len(decoding)
        # What is not verified is not known to be right: now and then it is tried, where it would pay if it were good.
        self._num_idle += 1
        is_hopeful = self._num_idle % _PROBE_EVERY == 0
        self._sequences = {sequence.sequence_id: sequence for sequence, _ in decoding}
        self._num_missing = sum(
            self._contexts.num_missing(sequence.sequence_id, sequence.token_ids) - 1 for sequence, _ in decoding
        )
        rates = []
        for sequence, room in decoding:
            count = max(0, min(most, room, self._context_length - sequence.num_tokens))
            if not self._pays_to_catch_up(sequence):
                count = 0
            rate = self._book.rate(sequence.sequence_id, 0)
            rates.append((max(rate, _HOPEFUL) if is_hopeful else rate,) * count)
        return rates

    def _pays_to_catch_up(self, sequence: ScheduledSequence) -> bool:
        num_missing = self._contexts.num_missing(sequence.sequence_id, sequence.token_ids)
        once = self._cost.predict(1)
        num_left = sequence.max_total_tokens - sequence.num_tokens
        return self._cost.predict(num_missing) - once <= _MAX_CATCH_UP_SHARE * num_left * once

    def seconds(self, depth: int) -> float:
        num_rows = len(self._sequences)
        once = self._cost.predict(num_rows)
        missing = self._cost.predict(num_rows + min(self._num_missing, _CATCH_UP_TOKENS)) - once
        return depth * once + max(0.0, missing) / _WRITTEN_OFF_OVER

    def propose(self, counts: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        self._num_idle = 0
        try:
            return self._propose(counts)
        except Exception:
            # The target does without; its output is the same.
            log.exception("draft_model_failed")
            self.has_failed = True
            return {}

    def record(self, sequence: ScheduledSequence, num_proposed: int, num_accepted: int) -> None:
        for place in range(min(num_proposed, num_accepted + 1)):
            self._book.record(sequence.sequence_id, 0, is_right=place < num_accepted)

    def forget(self, sequence_id: str) -> None:
        self._contexts.forget(sequence_id)
        self._book.forget(sequence_id)
        self._samplings.pop(sequence_id, None)
        self._executor.forget(sequence_id)

    def check_integrity(self) -> None:
        """Raises unless blocks and contexts agree; for tests and debugging."""
        self._contexts.check_integrity()

    def _propose(self, counts: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        begun = self._begin(counts)
        proposals = begun
        while proposals:
            self._run(proposals)
            proposals = [each for each in proposals if each.due]
        return {each.sequence.sequence_id: tuple(each.token_ids) for each in begun if each.token_ids}

    def _begin(self, counts: Mapping[str, int]) -> list[_Proposal]:
        """The sequences that memory and the bound of a step admit, with what they have not computed yet."""
        budget = _CATCH_UP_TOKENS
        begun = []
        for sequence_id, count in counts.items():
            sequence = self._sequences[sequence_id]
            context = self._contexts.use(sequence_id, sequence.token_ids)
            due = tuple(sequence.token_ids[context.num_computed :][:budget])
            # The last proposed token is not computed.
            needed = sequence.num_tokens + count - 1
            if due and self._contexts.reserve(context, needed, spared=counts.keys()):
                budget -= len(due) - 1
                begun.append(_Proposal(sequence=sequence, context=context, count=count, due=due))
        return begun

    def _run(self, proposals: Sequence[_Proposal]) -> None:
        """Computes what is due of each, and what is due then: a drawn token, until there are enough."""
        plan = StepPlan(sequences=tuple(_plan(each) for each in proposals))
        sampled = [each for each in proposals if each.is_sampled]
        started = self._timer()
        outcomes = self._executor.run(plan, [self._request(each) for each in sampled])
        if len(sampled) == plan.num_tokens:
            self._cost.observe(plan.num_tokens, max(1e-9, self._timer() - started))
        for each in proposals:
            each.context.compute(each.due, each.sequence.num_tokens)
            each.due = ()
        for each, outcome in zip(sampled, outcomes, strict=True):
            if not isinstance(outcome, Sampled):
                # As good as wrong: else a model that cannot tell would be asked in every step.
                self._book.record(each.sequence.sequence_id, 0, is_right=False)
                continue
            each.token_ids.append(outcome.token_id)
            if len(each.token_ids) < each.count:
                each.due = (outcome.token_id,)

    def _request(self, proposal: _Proposal) -> SampleRequest:
        assert self._request_behind is not None, "bound before the first step"
        sequence_id = proposal.sequence.sequence_id
        request = self._request_behind(sequence_id, tuple(proposal.token_ids))
        sampling = self._samplings.get(sequence_id)
        if sampling is None:
            sampling = self._samplings[sequence_id] = replace(request.sampling, logprobs=None)
        return replace(request, sampling=sampling)


def _plan(proposal: _Proposal) -> PlannedSequence:
    return PlannedSequence(
        sequence_id=proposal.sequence.sequence_id,
        start=proposal.context.num_computed,
        token_ids=proposal.due,
        block_table=tuple(proposal.context.block_table),
        is_sampled=proposal.is_sampled,
    )
