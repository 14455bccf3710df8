"""A plan between its making and its record. Pure."""

from dataclasses import dataclass

from gpu_worker.engine.execution import Launch
from gpu_worker.engine.sequence import UNKNOWN_TOKEN, PlannedSequence, Sequence, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """planned: of the plan, what was to be computed once its blocks were moved. launch: None if nobody computes it yet."""

    plan: StepPlan
    planned: tuple[PlannedSequence, ...] = ()
    launch: Launch | None = None
    started: float = 0.0


def with_known_token(planned: PlannedSequence, sequence: Sequence) -> PlannedSequence:
    """The same once the token is known that was being drawn while the plan was made."""
    if planned.token_ids[-1] != UNKNOWN_TOKEN:
        return planned
    return PlannedSequence(
        sequence_id=planned.sequence_id,
        start=planned.start,
        token_ids=tuple(sequence.token_ids[planned.start : planned.context_length]),
        block_table=planned.block_table,
        is_sampled=planned.is_sampled,
    )
