"""Computes plans on the executor so that a failure ends only the sequences that cause it. No torch.

When computing a step fails, its sequences are computed again in halves: those that fail alone end with a failure, the others
lose nothing. A lost device is nobody's failure and ends the engine.
"""

from collections.abc import Sequence
from itertools import islice

import structlog

from gpu_worker.engine.execution import (
    DeviceLostError,
    Executor,
    Launch,
    LaunchingExecutor,
    Sampled,
    SampleFailure,
    SampleRequest,
)
from gpu_worker.engine.flight import Flight, with_known_token
from gpu_worker.engine.live_sequences import LiveSequences
from gpu_worker.engine.sequence import UNKNOWN_TOKEN, BlockMoves, PlannedSequence, StepPlan
from gpu_worker.speculation.verification import accept

log = structlog.get_logger()

Outcomes = dict[str, tuple[Sampled, ...] | SampleFailure]
"""By sequence id: what was drawn for each sampled sequence, or why it cannot go on; the latter also for those that only
filled caches."""


class PlanRunner:
    """Over an executor, for the sequences in `live`. `step` is the number that its logs name."""

    def __init__(self, executor: Executor, live: LiveSequences, *, may_launch: bool) -> None:
        """`may_launch`: plans may be made before the tokens of the plan before are known."""
        self._executor = executor
        self._live = live
        self._launcher = executor if isinstance(executor, LaunchingExecutor) and may_launch else None

    def move(self, moves: BlockMoves, *, step: int) -> Exception | None:
        """Copies blocks; what went wrong, if anything did."""
        try:
            self._executor.move(moves)
        except DeviceLostError:
            raise
        except Exception as error:
            log.exception("moving_blocks_failed", step=step)
            return error
        return None

    def forget(self, sequence_id: str) -> None:
        """The sequence has ended."""
        self._executor.forget(sequence_id)

    def launch(self, planned: Sequence[PlannedSequence], *, step: int) -> Launch | None:
        """None when the plan has to be run by itself, with all its tokens known."""
        if self._launcher is None or not planned:
            return None
        requests = [
            self._live.request_behind(
                each.sequence_id, each.token_ids[-1:] if each.token_ids[-1] == UNKNOWN_TOKEN else ()
            )
            for each in planned
            if each.is_sampled
        ]
        if not self._launcher.can_launch(requests):
            return None
        try:
            return self._launcher.launch(StepPlan(sequences=tuple(planned)), requests)
        except DeviceLostError:
            raise
        except Exception:
            log.exception("launch_failed", step=step, num_sequences=len(planned))
            return None

    def outcomes(self, flight: Flight, *, step: int) -> Outcomes:
        """Of the sequences that are still there; waits for what was launched, and runs what was not."""
        if flight.launch is None:
            planned = [each for each in flight.planned if each.sequence_id in self._live]
            known = [with_known_token(each, self._live[each.sequence_id].sequence) for each in planned]
            return self.run(known, step=step)
        sampled_ids = [each.sequence_id for each in flight.planned if each.is_sampled]
        outcomes = _alone(sampled_ids, flight.launch.collect())
        return {sequence_id: result for sequence_id, result in outcomes.items() if sequence_id in self._live}

    def _requests(self, sampled: Sequence[PlannedSequence]) -> list[SampleRequest]:
        return [
            self._live.request_behind(each.sequence_id, each.draft_token_ids[:place])
            for each in sampled
            for place in range(each.num_sampled_rows)
        ]

    def run(self, planned: Sequence[PlannedSequence], *, step: int) -> Outcomes:
        """Computes these; in halves when that fails."""
        if not planned:
            return {}
        sampled = [each for each in planned if each.is_sampled]
        has_drafts = any(each.num_drafts for each in sampled)
        requests = (
            self._requests(sampled) if has_drafts else [self._live.request_behind(each.sequence_id) for each in sampled]
        )
        try:
            results = self._executor.run(StepPlan(sequences=tuple(planned)), requests)
            assert len(results) == len(requests), "one outcome for each sampled row"
            return (
                _accepted(sampled, results) if has_drafts else _alone([each.sequence_id for each in sampled], results)
            )
        except DeviceLostError:
            raise
        except Exception as error:
            # Whatever the model raised, it must not end the sequences that did not cause it.
            log.exception("step_failed", step=step, num_sequences=len(planned))
            if has_drafts:
                return self.run([each.without_drafts() for each in planned], step=step)
            if len(planned) == 1:
                return {planned[0].sequence_id: SampleFailure(reason=f"the step failed: {describe(error)}")}
        half = len(planned) // 2
        return self.run(planned[:half], step=step) | self.run(planned[half:], step=step)


def _alone(sequence_ids: Sequence[str], results: Sequence[Sampled | SampleFailure]) -> Outcomes:
    """Of sequences with one row each."""
    return {
        sequence_id: result if isinstance(result, SampleFailure) else (result,)
        for sequence_id, result in zip(sequence_ids, results, strict=True)
    }


def _accepted(sampled: Sequence[PlannedSequence], results: Sequence[Sampled | SampleFailure]) -> Outcomes:
    """Of sequences with rows behind proposed tokens."""
    rows = iter(results)
    return {
        each.sequence_id: accept(each.draft_token_ids, tuple(islice(rows, each.num_sampled_rows))) for each in sampled
    }


def describe(error: Exception) -> str:
    """For the failure of a sequence."""
    return f"{type(error).__name__}: {error}"
