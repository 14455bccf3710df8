"""The int8 kernels: products of rows, rounded on the way, with int8 weights. One call for each product."""

import ctypes
from ctypes import c_int64, c_void_p

import torch

from gpu_worker.kernels.large_pages import WEIGHTS
from gpu_worker.kernels.product import ProductKernels

COLUMNS = 16
"""Outputs of a panel of weights."""
LARGEST_ACTIVATION = 511


class _Int8(ctypes.Structure):
    """SluiceInt8 of calls.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("weights", "scales", "bias")),
        *((name, c_int64) for name in ("inputs", "outputs")),
    )


class PackedWeight:
    """A copy of `weight` int8 [out, in] in panels [panels, in / 2, COLUMNS, 2], with the scale [out] of its rows and a bias."""

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.num_outputs, self.num_inputs = weight.shape
        size = -(-self.num_outputs // COLUMNS) * COLUMNS
        padded = torch.zeros(size, self.num_inputs + self.num_inputs % 2, dtype=torch.int8)
        padded[: self.num_outputs, : self.num_inputs] = weight
        panels = WEIGHTS.empty(padded.numel()).view(torch.int8)
        pairs = padded.view(size // COLUMNS, COLUMNS, padded.shape[1] // 2, 2).permute(0, 2, 1, 3)
        panels.view(pairs.shape).copy_(pairs)
        padded_scale, padded_bias = _pad(scale, size), None if bias is None else _pad(bias, size)
        self._kept = (panels, padded_scale, padded_bias)
        self._struct = _Int8(
            weights=panels.data_ptr(),
            scales=padded_scale.data_ptr(),
            bias=None if padded_bias is None else padded_bias.data_ptr(),
            inputs=self.num_inputs,
            outputs=self.num_outputs,
        )
        self.address = ctypes.addressof(self._struct)


class Int8Kernels(ProductKernels):
    """The products with int8 weights."""

    kind = "int8"


def _pad(values: torch.Tensor, size: int) -> torch.Tensor:
    padded = torch.zeros(size, dtype=torch.float32)
    padded[: len(values)] = values
    return padded
