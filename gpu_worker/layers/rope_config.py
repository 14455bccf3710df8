"""Parameters of the rotary position embedding. Pure."""

import math
from dataclasses import dataclass
from typing import Literal

RopeType = Literal["default", "linear", "llama3", "yarn", "divided"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (arXiv:2104.09864) and how it is stretched beyond the context it was trained with."""

    rope_type: RopeType = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_context_length: int = 0
    """llama3 and yarn: tokens of context before the stretch."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    """llama3: waves that turn fewer times than the first in the original context are stretched by the whole factor, those
    that turn more often than the second are kept."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    """yarn: the same two limits, the other way round."""
    truncate: bool = True
    """yarn: whether the limits are rounded outwards to whole pairs."""
    attention_factor: float = 1.0
    """yarn: cosines and sines are multiplied by it."""
    divisors: tuple[float, ...] = ()
    """divided: how many times slower each pair turns."""


def yarn_attention_factor(factor: float, *, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """What YaRN (arXiv:2309.00071, section 3.4) multiplies cosines and sines by when the config does not say."""
    if mscale and mscale_all_dim:
        return _magnitude(factor, mscale) / _magnitude(factor, mscale_all_dim)
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
