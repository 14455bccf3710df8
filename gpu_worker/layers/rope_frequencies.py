"""How fast each pair of a head turns: the default, and four ways to stretch it to a longer context."""

import math
from typing import assert_never

import torch

from gpu_worker.layers.rope_config import RopeConfig


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """fp32 angles per position, one for each pair of a head: [head_dim / 2], on the CPU."""
    wavelengths = config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    frequencies = 1.0 / wavelengths
    match config.rope_type:
        case "default":
            return frequencies
        case "linear":
            return frequencies / config.factor
        case "llama3":
            return _stretch_low_frequencies(frequencies, config)
        case "yarn":
            kept = 1 - _ramp(*_yarn_limits(config, head_dim), head_dim // 2)
            return 1.0 / (config.factor * wavelengths) * (1 - kept) + frequencies * kept
        case "divided":
            return frequencies / torch.tensor(config.divisors)
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


def _yarn_limits(config: RopeConfig, head_dim: int) -> tuple[float, float]:
    """Pairs before the first are kept, behind the second stretched by the whole factor (arXiv:2309.00071, section 3.2)."""
    limits = [
        head_dim * math.log(config.original_context_length / (num_turns * 2 * math.pi)) / (2 * math.log(config.theta))
        for num_turns in (config.beta_fast, config.beta_slow)
    ]
    if config.truncate:
        limits = [math.floor(limits[0]), math.ceil(limits[1])]
    return max(limits[0], 0), min(limits[1], head_dim - 1)


def _ramp(first: float, last: float, num_pairs: int) -> torch.Tensor:
    """0 up to `first`, 1 from `last` on, a straight line between."""
    width = last - first if last != first else 0.001
    return ((torch.arange(num_pairs, dtype=torch.float32) - first) / width).clamp(0, 1)
