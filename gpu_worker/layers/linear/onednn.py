"""fp32 matrix products on a CPU with weights that oneDNN has laid out for itself.

The only place that knows these operators of torch: they are private, so each use is guarded, and whoever makes one of these
has the other linear at hand. Without a hint of a batch size the layout, and with it the order of every sum, is one and the
same for any number of rows; packed for a batch of one, single rows differ from the same rows in a batch.

oneDNN compiles a product for each shape and number of rows that it meets, in some milliseconds, and keeps about 0.6 MB of
each. So the rows are padded to a few sizes, and cut where they are more than the largest, which changes no bits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gpu_worker.layers.linear.row_sizes import LARGEST_SIZE, round_up
from gpu_worker.layers.linear.unfused import UnfusedLinear

_REORDER = "_reorder_linear_weight"
_MULTIPLY = "_linear_pointwise"
# A step of one row has a hundred products of some 100 us: what is worked out for each of them adds up.
_SIZE_BY_NUM_ROWS = tuple(round_up(num_rows) for num_rows in range(LARGEST_SIZE + 1))


class OneDnnUnavailableError(Exception):
    """These weights cannot be packed here; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneDnnOperators:
    """The two operators, found."""

    reorder: Callable[..., torch.Tensor]
    multiply: Callable[..., torch.Tensor]


def find_operators(namespace: Any) -> OneDnnOperators:
    """From `torch.ops.mkldnn`. Raises OneDnnUnavailableError."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        raise OneDnnUnavailableError("torch is built without oneDNN")
    for name in (_REORDER, _MULTIPLY):
        if not hasattr(namespace, name):
            raise OneDnnUnavailableError(f"torch {torch.__version__} has no operator mkldnn.{name}")
    return OneDnnOperators(reorder=getattr(namespace, _REORDER), multiply=getattr(namespace, _MULTIPLY))


class OneDnnLinear(UnfusedLinear):
    """Implements Linear. Holds a copy of the weight in oneDNN's layout, and none of the memory it was made from."""

    name = "onednn"
    is_batch_invariant = True

    def __init__(self, operators: OneDnnOperators, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Raises OneDnnUnavailableError."""
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            raise OneDnnUnavailableError(f"only fp32 on a CPU is packed, not {weight.dtype} on {weight.device.type}")
        self._multiply = operators.multiply
        self._num_outputs = weight.shape[0]
        self._bias = None if bias is None else bias.clone()
        try:
            self._packed = operators.reorder(weight, None)
        except (RuntimeError, TypeError) as error:
            raise OneDnnUnavailableError(f"packing failed: {error}") from error

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        num_rows = rows.shape[0]
        if num_rows > LARGEST_SIZE:
            return self._multiply_pieces(rows)
        size = _SIZE_BY_NUM_ROWS[num_rows]
        if size == num_rows:
            return self._multiply(rows, self._packed, self._bias, "none", [], "")
        padded = rows.new_empty(size, rows.shape[1])
        padded[:num_rows] = rows
        padded[num_rows:] = 0
        return self._multiply(padded, self._packed, self._bias, "none", [], "")[:num_rows]

    def _multiply_pieces(self, rows: torch.Tensor) -> torch.Tensor:
        result = rows.new_empty(len(rows), self._num_outputs)
        for start in range(0, len(rows), LARGEST_SIZE):
            result[start : start + LARGEST_SIZE] = self(rows[start : start + LARGEST_SIZE])
        return result
