"""Lets tests look at what a loaded model computes."""

from collections.abc import Sequence
from itertools import islice

import torch

from gpu_worker.engine.execution import Sampled, SampleFailure, SampleRequest
from gpu_worker.engine.loading import EngineParts
from gpu_worker.engine.sequence import StepPlan
from gpu_worker.speculation.verification import accept

RecordedLogits = dict[tuple[str, int], torch.Tensor]
"""Logits [vocab_size] by sequence id and context length: those from which the token at that position is drawn."""


def record_logits(parts: EngineParts) -> RecordedLogits:
    """From now on all logits that the loaded model's runner draws a counting token from land in the result."""
    recorded: RecordedLogits = {}
    logits_of, run = parts.runner.logits, parts.runner.run
    computed: list[torch.Tensor] = []

    def keep(plan: StepPlan) -> torch.Tensor:
        logits = logits_of(plan)
        computed[:] = [logits.clone()]
        return logits

    def record(plan: StepPlan, requests: Sequence[SampleRequest]) -> list[Sampled | SampleFailure]:
        outcomes = run(plan, requests)
        rows = iter(zip(computed[0], outcomes, strict=True))
        for planned in plan.sequences:
            own = list(islice(rows, planned.num_sampled_rows))
            taken = accept(planned.draft_token_ids, [outcome for _, outcome in own]) if own else ()
            num_taken = 1 if isinstance(taken, SampleFailure) else len(taken)
            for place, (row, _) in enumerate(own[:num_taken]):
                recorded[planned.sequence_id, planned.context_length - planned.num_drafts + place] = row
        return outcomes

    parts.runner.logits, parts.runner.run = keep, record  # type: ignore[method-assign]
    return recorded
