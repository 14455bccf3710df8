"""The matrix product of torch, on any device and in any type."""

import torch
from torch.nn.functional import linear

from gpu_worker.layers.linear.unfused import UnfusedLinear


class PlainLinear(UnfusedLinear):
    """Implements Linear. On a CPU the library chooses by the number of rows, so that rows depend on their neighbours."""

    name = "plain"
    is_batch_invariant = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return linear(rows, self._weight, self._bias)
