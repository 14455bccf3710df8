"""What makes the input of a product, as a step of its own."""

import torch

from gpu_worker.layers.activation import silu_and_multiply
from gpu_worker.layers.norm import Norm, add_rms_norm


class UnfusedLinear:
    """Base of linears that take rows as they are: norm and gate come before, in passes of their own."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def after_norm(self, hidden: torch.Tensor, delta: torch.Tensor | None, norm: Norm) -> torch.Tensor:
        return self(add_rms_norm(hidden, delta, norm))

    def after_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self(silu_and_multiply(gate_up))
