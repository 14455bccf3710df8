"""What the sampler asks about the rows of one step; the fused kernels answer where they can, numpy elsewhere."""

from collections.abc import Collection, Mapping
from typing import Protocol

import torch

from gpu_worker.engine.draws import Draw
from gpu_worker.engine.fused_rows import FusedRows
from gpu_worker.engine.logprobs import RowLogprobs
from gpu_worker.engine.plain_rows import PlainRows
from gpu_worker.kernels.library import kernels_for


class RowSampler(Protocol):
    """The logits of one step, [R, vocab_size]. Mutates nothing; rows do not influence each other."""

    def find_not_finite(self) -> list[int]:
        """Rows that held NaN or infinity when the sampler was made, before any edit."""

    def measure(self, limits: Mapping[int, int]) -> dict[int, RowLogprobs]:
        """The distribution of finite rows as they are now, with as many of the most probable tokens as each row's limit.

        The logits are looked at again when a token is asked for: they have to have the same values then.
        """

    def choose(self, draws: Mapping[int, Draw], changed: Collection[int]) -> dict[int, int]:
        """The token of each row of `draws`, which has one that is not minus infinity, by the logits as they are now.

        changed: the rows that were edited since this sampler was made.
        """


def make_row_sampler(logits: torch.Tensor) -> RowSampler:
    """Over contiguous `logits` [R, vocab_size], R > 0."""
    if kernels := kernels_for(logits):
        return FusedRows(kernels, logits)
    return PlainRows(logits)
