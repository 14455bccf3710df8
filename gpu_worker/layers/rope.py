"""Rotary position embedding (arXiv:2104.09864): default, linearly stretched, and Llama 3's stretch by frequency."""

import math
from dataclasses import dataclass
from typing import assert_never

import numpy as np
import torch

from gpu_worker.layers.rope_config import RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """fp32 angles per position, one for each pair of a head: [head_dim / 2], on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (config.theta**exponents)
    match config.rope_type:
        case "default":
            return frequencies
        case "linear":
            return frequencies / config.factor
        case "llama3":
            return _stretch_low_frequencies(frequencies, config)
        case _:
            assert_never(config.rope_type)


def _stretch_low_frequencies(frequencies: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, those between interpolated."""
    wavelengths = 2 * math.pi / frequencies
    longest_kept = config.original_context_length / config.high_freq_factor
    shortest_stretched = config.original_context_length / config.low_freq_factor
    share = (config.original_context_length / wavelengths - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    between = (1 - share) * frequencies / config.factor + share * frequencies
    stretched = torch.where(wavelengths > shortest_stretched, frequencies / config.factor, between)
    return torch.where(wavelengths < longest_kept, frequencies, stretched)


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
        first, second = heads.chunk(2, dim=-1)
        cos, sin = self.turns[:, None, 0], self.turns[:, None, 1]
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return heads.copy_(turned)
