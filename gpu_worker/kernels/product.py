"""Products of rows with packed weights, of any kind of weights. One call for each product, with what comes before it."""

from typing import Protocol

import torch

from gpu_worker.kernels.library import CpuKernels


class PackedWeight(Protocol):
    """A weight in the layout of its kernels, which find it at `address`."""

    num_inputs: int
    num_outputs: int
    address: int


class ProductKernels:
    """The functions for one kind of weights, on fp32 rows of the CPU and on the threads that torch is set to.

    For one thread of Python at a time: products share a workspace.
    """

    kind: str
    """As the names of the functions have it."""

    def __init__(self, kernels: CpuKernels) -> None:
        functions = kernels.functions
        self.workspace_size = getattr(functions, f"sluice_{self.kind}_workspace_size")
        self.layer = getattr(functions, f"sluice_{self.kind}_layer")
        self._rows = getattr(functions, f"sluice_{self.kind}_rows")
        self._after_norm = getattr(functions, f"sluice_{self.kind}_after_norm")
        self._after_gate = getattr(functions, f"sluice_{self.kind}_after_gate")
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._workspace_address = 0

    def multiply(self, rows: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """[T, out] of `rows` [T, in] that are dense in themselves."""
        num_rows, threads = rows.shape[0], torch.get_num_threads()
        _check(rows, weight.num_inputs)
        out = torch.empty((num_rows, weight.num_outputs), dtype=torch.float32)
        self._rows(
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
        self._after_norm(
            weight.address, hidden.data_ptr(), None if delta is None else delta.data_ptr(), norm[0].data_ptr(), norm[1],
            num_rows, self._reserve(weight, num_rows, threads), out.data_ptr(), threads,
        )  # fmt: skip
        return out

    def multiply_after_gate(self, gate_up: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """[T, out] of silu(gate) * up, of `gate_up` [T, 2 * in]."""
        num_rows, threads = gate_up.shape[0], torch.get_num_threads()
        _check(gate_up, 2 * weight.num_inputs)
        out = torch.empty((num_rows, weight.num_outputs), dtype=torch.float32)
        self._after_gate(
            weight.address, gate_up.data_ptr(), gate_up.stride(0), num_rows, self._reserve(weight, num_rows, threads),
            out.data_ptr(), threads,
        )  # fmt: skip
        return out

    def _reserve(self, weight: PackedWeight, num_rows: int, threads: int) -> int:
        """The address of a workspace that is large enough."""
        needed = self.workspace_size(weight.address, num_rows, threads)
        if needed > self._workspace.shape[0]:
            self._workspace = torch.empty(needed, dtype=torch.uint8)
            self._workspace_address = self._workspace.data_ptr()
        return self._workspace_address


def _check(rows: torch.Tensor, width: int) -> None:
    assert rows.dtype == torch.float32
    assert rows.shape[1] == width
    assert rows.stride(1) == 1
