"""Parameters of the rotary position embedding. Pure."""

from dataclasses import dataclass
from typing import Literal

RopeType = Literal["default", "linear", "llama3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (arXiv:2104.09864) and how it is stretched; the last three belong to llama3."""

    rope_type: RopeType = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_context_length: int = 0
