"""Our matrix products in place of those in the model code of transformers."""

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from gpu_worker.artifacts.smoothing import round_weight
from gpu_worker.layers.linear.port import Linear, MakeLinear


class PackedLinear(nn.Module):
    """A product of ours as a module. Model code that looks at `weight` finds shape and type, but no numbers."""

    def __init__(self, linear: Linear, *, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.in_features, self.out_features = num_inputs, num_outputs
        self.weight = torch.empty(num_outputs, num_inputs, device="meta")
        self.linear = linear

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[…, in] -> […, out]."""
        rows = self.linear(inputs.reshape(-1, self.in_features))
        return rows.view(*inputs.shape[:-1], self.out_features)


def pack_linears(module: Any, make_linear: MakeLinear, *, is_int8: bool = False) -> list[Linear]:
    """Puts packed products in place of `module`'s plain ones, one by one, so that little is held twice at a time.

    With `is_int8` their weights are rounded, row by row, the same bits at every load; all other numbers stay as they are.
    Only exactly nn.Linear and Conv1D (GPT-2's, whose weight lies the other way round): a subclass may compute otherwise.
    Experts whose weights are one tensor stay as they are.
    """
    packed: list[Linear] = []
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                weight, bias = child.weight, child.bias
            elif type(child) is Conv1D:
                weight, bias = child.weight.t().contiguous(), child.bias
            else:
                continue
            linear = _pack(make_linear, weight.detach(), None if bias is None else bias.detach(), is_int8=is_int8)
            packed.append(linear)
            num_outputs, num_inputs = weight.shape
            setattr(parent, name, PackedLinear(linear, num_inputs=num_inputs, num_outputs=num_outputs))
    return packed


def _pack(make_linear: MakeLinear, weight: torch.Tensor, bias: torch.Tensor | None, *, is_int8: bool) -> Linear:
    if not is_int8:
        return make_linear(weight, bias)
    rounded, scale = round_weight(weight)
    return make_linear(rounded, bias, scale)
