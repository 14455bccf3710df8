"""Samples the rows of a step with numpy, for logits of any device: the contract of the fused kernels, and what serves
without them.

The device compares and gathers, which is exact everywhere; exponentials and sums are the host's.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from gpu_worker.engine.candidates import find_largest, join
from gpu_worker.engine.draws import Draw, draw_candidates
from gpu_worker.engine.logprobs import RowLogprobs, measure_rows
from gpu_worker.engine.whole_rows import RowWeights


class PlainRows:
    """Implements `gpu_worker.engine.row_sampler.RowSampler` over contiguous `logits` [R, vocab_size] of any device."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits
        self._vocab_size = logits.shape[1]

    def find_not_finite(self) -> list[int]:
        # A sum is not finite if any addend is not, and costs one quick pass; large finite addends are told apart afterwards.
        suspects = np.flatnonzero(~np.isfinite(self._logits.sum(-1).cpu().numpy())).tolist()
        return [row for row in suspects if not bool(torch.isfinite(self._logits[row]).all())]

    def measure(self, limits: Mapping[int, int]) -> dict[int, RowLogprobs]:
        measured = measure_rows(self._select(list(limits)), list(limits.values()))
        return dict(zip(limits, measured, strict=True))

    def choose(self, draws: Mapping[int, Draw], changed: Collection[int]) -> dict[int, int]:  # noqa: ARG002
        greedy = [row for row, draw in draws.items() if draw.temperature == 0]
        tokens = dict(zip(greedy, _argmax(self._select(greedy)), strict=True)) if greedy else {}
        return tokens | self._draw({row: draw for row, draw in draws.items() if draw.temperature > 0})

    def _draw(self, draws: dict[int, Draw]) -> dict[int, int]:
        limited = [row for row, draw in draws.items() if draw.top_k]
        parts_by_row: list[int] = [*limited]
        parts = [find_largest(self._select(limited), [draws[row].top_k for row in limited])] if limited else []
        whole = [row for row, draw in draws.items() if not draw.top_k]
        tokens: dict[int, int] = {}
        if whole:
            weights = RowWeights(self._vocab_size)
            for row, values in zip(whole, self._select(whole).cpu().numpy(), strict=True):
                weights.weigh(values, draws[row].temperature)
                if draws[row].is_whole:
                    tokens[row] = weights.draw(draws[row].uniform)
                else:
                    parts.append(weights.restrict(draws[row]))
                    parts_by_row.append(row)
                    draws[row] = replace(draws[row], total=weights.total)
        if parts:
            drawn = draw_candidates(join(parts), [draws[row] for row in parts_by_row])
            tokens |= zip(parts_by_row, drawn, strict=True)
        return tokens

    def _select(self, rows: Sequence[int]) -> torch.Tensor:
        """The chosen rows; without a copy when these are all."""
        if len(rows) == len(self._logits):
            return self._logits
        return self._logits[torch.tensor(rows, dtype=torch.int64, device=self._logits.device)]


def _argmax(logits: torch.Tensor) -> list[int]:
    """The largest of each row, of equals the first."""
    if logits.device.type == "cpu":
        # Ten times faster than torch's.
        tokens: list[int] = logits.numpy().argmax(axis=-1).tolist()
        return tokens
    return [int(token) for token in logits.argmax(-1).tolist()]
