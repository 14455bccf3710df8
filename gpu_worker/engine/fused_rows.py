"""Samples the rows of a step with the compiled kernels: one pass over a row to look at it, one more to weigh it."""

from collections.abc import Collection, Mapping

import numpy as np
import torch

from gpu_worker.engine.draws import Draw
from gpu_worker.engine.logprobs import RowLogprobs, rank
from gpu_worker.kernels.library import CpuKernels
from gpu_worker.kernels.sampling import SamplingKernels


class FusedRows:
    """Implements `gpu_worker.engine.row_sampler.RowSampler` over contiguous fp32 `logits` [R, vocab_size] of the CPU.

    Its weights are nearer to the exact ones than those of numpy in 32 bits, so that the two differ where a uniform, or the
    share at which a nucleus ends, is within 2e-6 of a token's border, or a weight within its rounding of min-p. Rows
    without top-k and top-p differ for no other reason than the first.
    """

    def __init__(self, kernels: CpuKernels, logits: torch.Tensor) -> None:
        self._kernels = SamplingKernels(kernels, logits)
        self._logits = logits
        self._best = self._kernels.find_best()

    def find_not_finite(self) -> list[int]:
        return [row for row, token in enumerate(self._best) if token < 0]

    def measure(self, limits: Mapping[int, int]) -> dict[int, RowLogprobs]:
        if not limits:
            return {}
        rows = self._logits.numpy()
        counts = [min(limit, rows.shape[1]) for limit in limits.values()]
        measures = self._kernels.measure(list(limits), counts)
        logprobs = (measures.logits - measures.log_totals[:, None]).astype(np.float32).tolist()
        log_totals, token_ids = measures.log_totals.tolist(), measures.token_ids.tolist()
        return {
            row: RowLogprobs(
                logits=rows[row],
                log_total=log_totals[place],
                top=rank(token_ids[place][:count], logprobs[place][:count]),
            )
            for place, (row, count) in enumerate(zip(limits, counts, strict=True))
        }

    def choose(self, draws: Mapping[int, Draw], changed: Collection[int]) -> dict[int, int]:
        known = {row for row, draw in draws.items() if draw.temperature == 0 and row not in changed}
        tokens = {row: self._best[row] for row in known}
        rows = [row for row in draws if row not in known]
        if rows:
            fields = [
                (draw.temperature, draw.top_k, draw.top_p, draw.min_p, draw.uniform)
                for draw in (draws[row] for row in rows)
            ]
            tokens |= zip(rows, self._kernels.draw(rows, fields), strict=True)
        return tokens
