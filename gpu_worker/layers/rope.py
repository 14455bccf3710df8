"""Rotary position embedding (arXiv:2104.09864): the turn of each position, and its application to heads."""

from dataclasses import dataclass

import numpy as np
import torch

from gpu_worker.kernels.library import kernels_for


class RotaryTable:
    """Cosines and sines of every position, made once: [num_positions, 2, head_dim / 2] in the model's type.

    The angles are fp32, as in the models' own code. Cosines and sines are taken in fp64 by one thread and rounded: torch's
    fp32 ones depend on where a thread's share ends, so that the same position would not have the same bits everywhere.
    """

    def __init__(
        self, frequencies: torch.Tensor, *, num_positions: int, dtype: torch.dtype, scale: float = 1.0
    ) -> None:
        """`frequencies` [head_dim / 2] name the device; `scale` multiplies cosines and sines (YaRN's attention factor)."""
        angles = np.arange(num_positions, dtype=np.float32)[:, None] * frequencies.cpu().float().numpy()
        table = np.empty((num_positions, 2, angles.shape[1]), dtype=np.float32)
        np.cos(angles, out=table[:, 0], dtype=np.float64, casting="same_kind")
        np.sin(angles, out=table[:, 1], dtype=np.float64, casting="same_kind")
        self._table = torch.from_numpy(table * np.float32(scale)).to(dtype).to(frequencies.device)

    def at(self, positions: torch.Tensor) -> "Rotation":
        """The rotation of rows at `positions` [T]."""
        return Rotation(turns=self._table.index_select(0, positions))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Cosines and sines of the rows of one step, [T, 2, head_dim / 2]; the same in every layer."""

    turns: torch.Tensor

    def apply(self, heads: torch.Tensor) -> torch.Tensor:
        """Turns `heads` [T, heads, head_dim] in place and returns them; element i is paired with i + head_dim / 2."""
        if kernels := kernels_for(heads, self.turns):
            kernels.rotate(heads, self.turns)
            return heads
        first, second = heads.chunk(2, dim=-1)
        cos, sin = self.turns[:, None, 0], self.turns[:, None, 1]
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return heads.copy_(turned)
