"""The fp32 kernels: products of rows with weights in panels. One call for each product."""

import ctypes
import math
from ctypes import c_int64, c_void_p

import torch

from gpu_worker.kernels.large_pages import WEIGHTS
from gpu_worker.kernels.product import ProductKernels

COLUMNS = 16
"""Outputs of a panel of weights."""


class _Fp32(ctypes.Structure):
    """SluiceFp32 of calls.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("weights", "bias")),
        *((name, c_int64) for name in ("inputs", "outputs")),
    )


class PackedFp32:
    """A copy of `weight` fp32 [out, in] in panels [panels, in, COLUMNS], the last one filled up with zeros, and of a bias."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.num_outputs, self.num_inputs = weight.shape
        num_panels, num_full = -(-self.num_outputs // COLUMNS), self.num_outputs // COLUMNS
        shape = (num_panels, self.num_inputs, COLUMNS)
        panels = WEIGHTS.empty(math.prod(shape) * torch.float32.itemsize).view(torch.float32).view(shape)
        full = weight[: num_full * COLUMNS].view(num_full, COLUMNS, self.num_inputs)
        panels[:num_full] = full.transpose(1, 2)
        if num_full < num_panels:
            panels[num_full].zero_()
            panels[num_full, :, : self.num_outputs % COLUMNS] = weight[num_full * COLUMNS :].t()
        padded_bias = None
        if bias is not None:
            padded_bias = torch.zeros(num_panels * COLUMNS)
            padded_bias[: self.num_outputs] = bias
        self._kept = (panels, padded_bias)
        self._struct = _Fp32(
            weights=panels.data_ptr(),
            bias=None if padded_bias is None else padded_bias.data_ptr(),
            inputs=self.num_inputs,
            outputs=self.num_outputs,
        )
        self.address = ctypes.addressof(self._struct)


class Fp32Kernels(ProductKernels):
    """The products with fp32 weights."""

    kind = "fp32"
