"""The int8 kernels: products of rows, rounded on the way, with int8 weights. One call for each product."""

import ctypes
from ctypes import c_int64, c_void_p

import torch

from gpu_worker.kernels.large_pages import WEIGHTS
from gpu_worker.kernels.library import CpuKernels

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


class Int8Kernels:
    """The functions, on fp32 rows of the CPU and on the threads that torch is set to. For one thread of Python at a time:
    products share a workspace."""

    def __init__(self, kernels: CpuKernels) -> None:
        self.library = kernels
        self._functions = kernels.functions
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._workspace_address = 0

    def multiply(self, rows: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """[T, out] of `rows` [T, in] that are dense in themselves."""
        num_rows, threads = rows.shape[0], torch.get_num_threads()
        _check(rows, weight.num_inputs)
        out = torch.empty((num_rows, weight.num_outputs), dtype=torch.float32)
        self._functions.sluice_int8_rows(
            weight.address, rows.data_ptr(), rows.stride(0), num_rows, self._reserve(weight, num_rows, threads),
            out.data_ptr(), threads,
        )  # fmt: skip
        return out

    def multiply_after_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, norm: tuple[torch.Tensor, float], weight: PackedWeight
    ) -> torch.Tensor:
        """Adds `delta`, if there is one, to `hidden` [T, in] in place, and multiplies its rows normalised by weight and eps."""
        num_rows, threads = hidden.shape[0], torch.get_num_threads()
        _check(hidden, weight.num_inputs)
        assert hidden.is_contiguous()
        assert delta is None or (delta.is_contiguous() and delta.shape == hidden.shape)
        assert norm[0].numel() == weight.num_inputs
        out = torch.empty((num_rows, weight.num_outputs), dtype=torch.float32)
        self._functions.sluice_int8_after_norm(
            weight.address, hidden.data_ptr(), None if delta is None else delta.data_ptr(), norm[0].data_ptr(), norm[1],
            num_rows, self._reserve(weight, num_rows, threads), out.data_ptr(), threads,
        )  # fmt: skip
        return out

    def multiply_after_gate(self, gate_up: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """[T, out] of silu(gate) * up, of `gate_up` [T, 2 * in]."""
        num_rows, threads = gate_up.shape[0], torch.get_num_threads()
        _check(gate_up, 2 * weight.num_inputs)
        out = torch.empty((num_rows, weight.num_outputs), dtype=torch.float32)
        self._functions.sluice_int8_after_gate(
            weight.address, gate_up.data_ptr(), gate_up.stride(0), num_rows, self._reserve(weight, num_rows, threads),
            out.data_ptr(), threads,
        )  # fmt: skip
        return out

    def _reserve(self, weight: PackedWeight, num_rows: int, threads: int) -> int:
        """The address of a workspace that is large enough."""
        needed = self._functions.sluice_int8_workspace_size(weight.address, num_rows, threads)
        if needed > self._workspace.shape[0]:
            self._workspace = torch.empty(needed, dtype=torch.uint8)
            self._workspace_address = self._workspace.data_ptr()
        return self._workspace_address


def _check(rows: torch.Tensor, width: int) -> None:
    assert rows.dtype == torch.float32
    assert rows.shape[1] == width
    assert rows.stride(1) == 1


def _pad(values: torch.Tensor, size: int) -> torch.Tensor:
    padded = torch.zeros(size, dtype=torch.float32)
    padded[: len(values)] = values
    return padded
