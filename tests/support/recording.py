"""Lets tests look at what a loaded model computes."""

import torch

from gpu_worker.engine.loading import EngineParts
from gpu_worker.engine.sequence import StepPlan

RecordedLogits = dict[tuple[str, int], torch.Tensor]
"""Logits [vocab_size] by sequence id and context length: those from which the token at that position is drawn."""


def record_logits(parts: EngineParts) -> RecordedLogits:
    """From now on everything that the loaded model computes for sampled rows lands in the result."""
    recorded: RecordedLogits = {}
    logits_of = parts.runner.logits

    def record(plan: StepPlan) -> torch.Tensor:
        logits = logits_of(plan)
        sampled = [planned for planned in plan.sequences if planned.is_sampled]
        for planned, row in zip(sampled, logits, strict=True):
            recorded[planned.sequence_id, planned.context_length] = row.clone()
        return logits

    parts.runner.logits = record  # type: ignore[method-assign]
    return recorded
