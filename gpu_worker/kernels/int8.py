"""The int8 kernels: rows rounded to whole numbers, and their products with int8 weights."""

from dataclasses import dataclass

import torch

from gpu_worker.kernels.library import CpuKernels

COLUMNS = 16
"""Outputs of a panel of weights."""
LARGEST_ACTIVATION = 511


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedRows:
    """Whole numbers int16 [T, W], W even, and what one of them stands for in each row, fp32 [T]."""

    values: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def empty(cls, num_rows: int, width: int) -> "RoundedRows":
        """Room for rows of `width` numbers."""
        values = torch.empty(num_rows, width + width % 2, dtype=torch.int16)
        return cls(values=values, scales=torch.empty(num_rows, dtype=torch.float32))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """int8 [panels, W / 2, COLUMNS, 2]; the scale and the bias of each column of all panels."""

    panels: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None
    num_outputs: int

    @classmethod
    def of(cls, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> "PackedWeight":
        """A copy of `weight` int8 [out, in] in the kernel's layout."""
        num_outputs, num_inputs = weight.shape
        padded = torch.zeros(-(-num_outputs // COLUMNS) * COLUMNS, num_inputs + num_inputs % 2, dtype=torch.int8)
        padded[:num_outputs, :num_inputs] = weight
        panels = padded.view(len(padded) // COLUMNS, COLUMNS, padded.shape[1] // 2, 2)
        return cls(
            panels=panels.permute(0, 2, 1, 3).contiguous(),
            scale=_pad(scale, len(padded)),
            bias=None if bias is None else _pad(bias, len(padded)),
            num_outputs=num_outputs,
        )


class Int8Kernels:
    """The functions, on tensors of the CPU and on the threads that torch is set to."""

    def __init__(self, kernels: CpuKernels) -> None:
        self._functions = kernels.functions

    def round_rows(self, rows: torch.Tensor) -> RoundedRows:
        """Of fp32 `rows` [T, W] that are dense in themselves, each by its own largest magnitude."""
        num_rows, width = rows.shape
        assert rows.dtype == torch.float32
        assert rows.stride(1) == 1
        rounded = RoundedRows.empty(num_rows, width)
        self._functions.sluice_round_rows(
            rows.data_ptr(), rows.stride(0), num_rows, width, rounded.values.data_ptr(), rounded.scales.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return rounded

    def add_norm_and_round(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> RoundedRows:
        """Adds `delta`, if there is one, to `hidden` [T, W] in place, and rounds its normalised rows."""
        num_rows, width = hidden.shape
        assert hidden.dtype == torch.float32
        assert hidden.is_contiguous()
        assert delta is None or (delta.is_contiguous() and delta.shape == hidden.shape)
        assert weight.shape == (width,)
        rounded, threads = RoundedRows.empty(num_rows, width), torch.get_num_threads()
        scratch = torch.empty(threads * width, dtype=torch.float32)
        self._functions.sluice_add_norm_and_round(
            hidden.data_ptr(), None if delta is None else delta.data_ptr(), weight.data_ptr(), eps, num_rows, width,
            rounded.values.data_ptr(), rounded.scales.data_ptr(), scratch.data_ptr(), threads,
        )  # fmt: skip
        return rounded

    def gate_and_round(self, gate_up: torch.Tensor) -> RoundedRows:
        """Rounds silu(gate) * up of `gate_up` [T, 2 * W]."""
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        assert gate_up.dtype == torch.float32
        assert gate_up.stride(1) == 1
        rounded, threads = RoundedRows.empty(num_rows, width), torch.get_num_threads()
        scratch = torch.empty(threads * width, dtype=torch.float32)
        self._functions.sluice_gate_and_round(
            gate_up.data_ptr(), gate_up.stride(0), num_rows, width, rounded.values.data_ptr(), rounded.scales.data_ptr(),
            scratch.data_ptr(), threads,
        )  # fmt: skip
        return rounded

    def multiply(self, rows: RoundedRows, weight: PackedWeight) -> torch.Tensor:
        """fp32 [T, out]."""
        num_rows, num_pairs = len(rows.values), weight.panels.shape[1]
        assert rows.values.shape[1] == 2 * num_pairs
        out = torch.empty(num_rows, weight.num_outputs, dtype=torch.float32)
        self._functions.sluice_multiply_int8(
            rows.values.data_ptr(), rows.scales.data_ptr(), num_rows, weight.panels.data_ptr(), weight.scale.data_ptr(),
            None if weight.bias is None else weight.bias.data_ptr(), out.data_ptr(), num_pairs, weight.num_outputs,
            torch.get_num_threads(),
        )  # fmt: skip
        return out


def _pad(values: torch.Tensor, size: int) -> torch.Tensor:
    padded = torch.zeros(size, dtype=torch.float32)
    padded[: len(values)] = values
    return padded
