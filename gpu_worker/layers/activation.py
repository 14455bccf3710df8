"""The gate of an MLP with SiLU (arXiv:2002.05202)."""

import torch
from torch.nn.functional import silu

from gpu_worker.kernels.library import kernels_for


def silu_and_multiply(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, [T, I], of the fused product `gate_up` [T, 2 * I]: the gates first, then what they let through."""
    if kernels := kernels_for(gate_up):
        out = torch.empty((gate_up.shape[0], gate_up.shape[1] // 2), dtype=torch.float32)
        kernels.silu_and_multiply(gate_up, out)
        return out
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up
