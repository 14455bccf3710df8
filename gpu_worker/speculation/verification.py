"""Which drawn tokens count when some of the tokens before them were only proposed. Pure."""

from collections.abc import Sequence

from gpu_worker.engine.execution import Sampled, SampleFailure


def accept(drafts: Sequence[int], drawn: Sequence[Sampled | SampleFailure]) -> tuple[Sampled, ...] | SampleFailure:
    """`drawn[i]` stands behind `drafts[:i]`: it counts when these are what was drawn before it.

    Each was drawn from the target's own logits with the random number of its own position, so what counts is exactly what
    steps of one token would have drawn. A failure behind proposed tokens counts as not drawn: the next step meets it first.
    """
    assert len(drawn) == len(drafts) + 1, "one outcome behind each proposed token and one before them"
    taken: list[Sampled] = []
    for place, outcome in enumerate(drawn):
        if isinstance(outcome, SampleFailure):
            return tuple(taken) if taken else outcome
        taken.append(outcome)
        if place < len(drafts) and outcome.token_id != drafts[place]:
            break
    return tuple(taken)
