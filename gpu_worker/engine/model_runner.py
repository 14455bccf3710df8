"""Runs step plans: forward through the model, then one drawn token per sampled row."""

import itertools
from collections.abc import Callable, Sequence

import torch

from gpu_worker.attention.port import AttentionBackend, SequenceRows
from gpu_worker.attention.reported import reported
from gpu_worker.engine.execution import Sampled, SampleFailure, SampleRequest
from gpu_worker.engine.sampler import Sampler
from gpu_worker.engine.sequence import BlockMoves, PlannedSequence, StepPlan
from gpu_worker.models.port import PackedModel

_ROWS_AT_ONCE = 128
"""Rows whose logits over the whole vocabulary are held together."""


class ModelRunner:
    """Implements `gpu_worker.engine.execution.Executor` over one model and its KV memory on one device."""

    def __init__(
        self, *, model: PackedModel, attention: AttentionBackend, on_progress: Callable[[], None] = lambda: None
    ) -> None:
        """`on_progress` is called once per layer: a long step of a large model is not a hang."""
        self._model = model
        self._attention = attention
        self._report = on_progress
        self._sampler = Sampler()

    def move(self, moves: BlockMoves) -> None:
        with torch.inference_mode():
            self._attention.move(moves)

    def run(self, plan: StepPlan, requests: Sequence[SampleRequest]) -> list[Sampled | SampleFailure]:
        with torch.inference_mode():
            return self._sampler.sample(self.logits(plan), requests)

    def forget(self, sequence_id: str) -> None:
        self._sampler.forget(sequence_id)

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """fp32 logits [R, vocab_size] of the sampled rows in plan order.

        Writes the KV of the planned tokens. Idempotent: the same plan writes the same slots.
        """
        with torch.inference_mode():
            rows = pack_rows(plan.sequences)
            sampled_rows = [
                row
                for planned, packed in zip(plan.sequences, rows, strict=True)
                for row in range(packed.end_row - planned.num_sampled_rows, packed.end_row)
            ]
            # A step that only fills caches has no rows here, and no product over the vocabulary; one that only decodes has all.
            are_all = len(sampled_rows) == rows[-1].end_row
            return self._model.logits(self._forward(plan, rows, None if are_all else self._to_device(sampled_rows)))

    def log_probabilities(self, plan: StepPlan, next_ids: Sequence[int]) -> torch.Tensor:
        """Of each row's next token, fp32 [T]; a piece of the rows at a time. Writes KV as `logits` does."""
        with torch.inference_mode():
            chosen, targets = self._forward(plan, pack_rows(plan.sequences)), self._to_device(list(next_ids))
            found = chosen.new_empty(len(targets), dtype=torch.float32)
            for start in range(0, len(targets), _ROWS_AT_ONCE):
                piece = slice(start, start + _ROWS_AT_ONCE)
                log_probabilities = self._model.logits(chosen[piece]).log_softmax(dim=-1)
                found[piece] = log_probabilities.gather(1, targets[piece, None])[:, 0]
            return found

    def _forward(self, plan: StepPlan, rows: list[SequenceRows], chosen: torch.Tensor | None = None) -> torch.Tensor:
        token_ids = [token_id for planned in plan.sequences for token_id in planned.token_ids]
        positions = [
            position for planned in plan.sequences for position in range(planned.start, planned.context_length)
        ]
        attend = reported(self._attention.begin_step(rows), self._report)
        return self._model.forward(self._to_device(token_ids), self._to_device(positions), attend, chosen)

    def _to_device(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._model.device)


def pack_rows(sequences: tuple[PlannedSequence, ...]) -> list[SequenceRows]:
    """Places the rows of the sequences behind each other."""
    first_rows = itertools.accumulate((len(planned.token_ids) for planned in sequences), initial=0)
    return [
        SequenceRows(
            first_row=first_row,
            num_rows=len(planned.token_ids),
            context_length=planned.context_length,
            block_table=planned.block_table,
        )
        for planned, first_row in zip(sequences, first_rows, strict=False)
    ]
