"""The gate of an MLP with SiLU (arXiv:2002.05202)."""

import torch
from torch.nn.functional import silu


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, [T, I], of the fused product `gate_up` [T, 2 * I]: the gates first, then what they let through."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up
