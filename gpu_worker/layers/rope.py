"""Rotary position embedding (arXiv:2104.09864): default, linearly stretched, and Llama 3's stretch by frequency."""

import math
from dataclasses import dataclass
from typing import assert_never

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Cosines and sines of the rows of one step, [T, 1, head_dim / 2] each; the same in every layer."""

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def at(cls, positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype) -> "Rotation":
        """The rotation of rows at `positions` [T]; angles are computed in fp32."""
        angles = positions.float()[:, None, None] * frequencies
        return cls(cos=angles.cos().to(dtype), sin=angles.sin().to(dtype))

    def apply(self, heads: torch.Tensor) -> torch.Tensor:
        """Turns `heads` [T, heads, head_dim]; element i is paired with element i + head_dim / 2."""
        first, second = heads.chunk(2, dim=-1)
        return torch.cat((first * self.cos - second * self.sin, second * self.cos + first * self.sin), dim=-1)
