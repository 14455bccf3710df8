"""What a model asks of a matrix product."""

from typing import Protocol

import torch

from gpu_worker.layers.norm import Norm


class Linear(Protocol):
    """A weight [out, in] and an optional bias [out], read-only."""

    name: str
    is_batch_invariant: bool
    """Whether a row's result is the same bits whatever rows stand beside it, however many, and for any number of threads."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out], T may be 0; `rows` need not be contiguous and are not changed.

        What is not finite in a row makes some of its own result not finite, and touches no other row.
        """

    def after_norm(self, hidden: torch.Tensor, delta: torch.Tensor | None, norm: Norm) -> torch.Tensor:
        """The product of the normalised rows of `hidden` [T, in], to which `delta`, if any, is added in place before."""

    def after_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """The product of silu(gate) * up, of `gate_up` [T, 2 * in]."""


class MakeLinear(Protocol):
    """How a model turns the weights of a checkpoint into what it multiplies with."""

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None = None) -> Linear:
        """The result may keep the tensors; if it packs them it keeps none of their memory.

        With a `scale` [out] the weight is int8, and stands for its rows times their scales.
        """
