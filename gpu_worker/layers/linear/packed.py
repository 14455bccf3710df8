"""What products by our own kernels have in common, whatever the weights are."""

from typing import Generic, TypeVar

import torch

from gpu_worker.kernels.product import PackedWeight, ProductKernels
from gpu_worker.layers.norm import Norm

KernelsT = TypeVar("KernelsT", bound=ProductKernels)


class PackedLinear(Generic[KernelsT]):
    """Implements Linear over a weight in the layout of its kernels."""

    is_batch_invariant = True

    def __init__(self, kernels: KernelsT, packed: PackedWeight) -> None:
        self.kernels = kernels
        self.packed = packed

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.kernels.multiply(rows if rows.stride(1) == 1 else rows.contiguous(), self.packed)

    def after_norm(self, hidden: torch.Tensor, delta: torch.Tensor | None, norm: Norm) -> torch.Tensor:
        return self.kernels.multiply_after_norm(hidden, delta, (norm.weight, norm.eps), self.packed)

    def after_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self.kernels.multiply_after_gate(gate_up, self.packed)
