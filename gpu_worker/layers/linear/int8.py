"""Matrix products with int8 weights and rows rounded to 10 bits, by our own kernel on the CPU.

A row is rounded by its own largest magnitude and its products are summed as whole numbers (gpu_worker/kernels/int8.cpp), so
its bits do not depend on its neighbours.
"""

import torch

from gpu_worker.kernels.int8 import LARGEST_ACTIVATION, Int8Kernels, PackedWeight
from gpu_worker.layers.linear.packed import PackedLinear

LARGEST_WEIGHT = 127
_MAX_INPUTS = (2**31 - 1) // (LARGEST_WEIGHT * LARGEST_ACTIVATION)


class Int8UnavailableError(Exception):
    """These weights cannot be multiplied as int8 here; the text says why."""


class Int8Linear(PackedLinear[Int8Kernels]):
    """Implements Linear. Holds a copy of the weight in the kernel's layout, and none of the memory it was made from."""

    name = "int8"

    def __init__(
        self, kernels: Int8Kernels | None, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """`weight` int8 [out, in] within ±LARGEST_WEIGHT, `scale` fp32 [out]. Raises Int8UnavailableError."""
        num_inputs = weight.shape[1]
        if weight.device.type != "cpu":
            raise Int8UnavailableError(f"only weights on a CPU are multiplied as int8, not on {weight.device.type}")
        if kernels is None:
            raise Int8UnavailableError("the CPU kernels are missing")
        if num_inputs > _MAX_INPUTS:
            raise Int8UnavailableError(
                f"sums over {num_inputs} inputs may exceed 32 bits, those over {_MAX_INPUTS} cannot"
            )
        if int(weight.min()) < -LARGEST_WEIGHT:
            raise Int8UnavailableError(f"a weight is below -{LARGEST_WEIGHT}")
        super().__init__(kernels, PackedWeight(weight, scale, bias))
