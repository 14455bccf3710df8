"""A native engine whose logits can be looked at."""

from pathlib import Path

import torch

from gpu_worker.engine.engine import NativeEngine
from gpu_worker.engine.loading import EngineParts, load_parts, make_engine
from gpu_worker.engine.sequence import StepPlan
from gpu_worker.engine.settings import EngineSettings

RecordedLogits = dict[tuple[str, int], torch.Tensor]
"""Logits [vocab_size] by sequence id and context length: those from which the token at that position is drawn."""


def load_recording_engine(directory: Path, settings: EngineSettings) -> tuple[NativeEngine, RecordedLogits]:
    """The engine of a model directory, and what it computes, filled in step by step."""
    parts = load_parts(directory, settings)
    recorded = record_logits(parts)
    return make_engine(parts, settings), recorded


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
