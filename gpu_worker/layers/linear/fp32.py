"""fp32 matrix products by our own kernel on the CPU.

Each output is a sum of chains of fused multiply-adds in a fixed order (gpu_worker/kernels/fp32_tiles.h), so its bits depend neither
on its neighbours nor on the instruction set.
"""

import torch

from gpu_worker.kernels.fp32 import Fp32Kernels, PackedFp32
from gpu_worker.layers.linear.packed import PackedLinear


class Fp32UnavailableError(Exception):
    """These weights cannot be multiplied by our kernel here; the text says why."""


class Fp32Linear(PackedLinear[Fp32Kernels]):
    """Implements Linear. Holds a copy of the weight in the kernel's layout, and none of the memory it was made from."""

    name = "fp32"

    def __init__(self, kernels: Fp32Kernels | None, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """`weight` [out, in]. Raises Fp32UnavailableError."""
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            raise Fp32UnavailableError(f"only fp32 on a CPU is packed, not {weight.dtype} on {weight.device.type}")
        if kernels is None:
            raise Fp32UnavailableError("the CPU kernels are missing")
        super().__init__(kernels, PackedFp32(weight, bias))
