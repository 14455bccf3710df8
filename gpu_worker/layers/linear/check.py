"""Whether a linear does here what it promises. Small enough to run at every load."""

import torch
from torch.nn.functional import linear as plain_linear

from gpu_worker.layers.linear.port import Linear

_NUM_ROWS = 33
# Below, at and above the sizes at which libraries change their tiling.
_ROW_COUNTS = (1, 2, 5, 16)
FP32_TOLERANCE = 1e-3
INT8_TOLERANCE = 3e-2
"""Rounding a row to 8 bits moves its products by about a hundredth of the largest."""


def find_fault(
    linear: Linear, weight: torch.Tensor, bias: torch.Tensor | None, *, tolerance: float = FP32_TOLERANCE
) -> str | None:
    """What is wrong with `linear`, which was made of `weight` and `bias`; None if nothing.

    `tolerance` is relative to the largest result. A weight that is not a number somewhere is no fault.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_NUM_ROWS, weight.shape[1], generator=generator)
    try:
        result = linear(rows)
        parts = [linear(rows[:count]) for count in _ROW_COUNTS]
    except (RuntimeError, TypeError) as error:
        return f"its product failed: {error}"
    expected = plain_linear(rows[:2], weight, bias)
    counted = expected.isfinite()
    if not counted.any():
        counted, expected = torch.ones_like(counted), torch.zeros_like(expected)
        return None if result.shape == (_NUM_ROWS, weight.shape[0]) else "its product has another shape"
    difference = (result[:2] - expected)[counted].abs().max()
    if not difference <= tolerance * expected[counted].abs().max():
        return f"its product is wrong by {float(difference):.3g}"
    return find_row_dependence(result, parts)


def find_row_dependence(result: torch.Tensor, parts: list[torch.Tensor]) -> str | None:
    """Which number of rows gives other bits than the same rows had among all of `result`."""
    for part in parts:
        # Compared as integers: what is not a number equals itself.
        if not torch.equal(part.view(torch.int32), result[: len(part)].view(torch.int32)):
            return f"a product of {len(part)} rows has other bits than the same rows among {len(result)}"
    return None
