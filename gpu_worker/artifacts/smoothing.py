"""SmoothQuant (arXiv:2211.10438): channels that are large in the activations and small in the weights are evened out.

Channel j of a product's input is divided by s_j and column j of its weight multiplied by it, which changes nothing but what
rounding costs. The division is folded into what made the input: the norm before it, the rows of `up_proj` for `down_proj`,
those of `v_proj` for `o_proj`. A model has no more to compute than before.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from gpu_worker.layers.linear.int8 import LARGEST_WEIGHT
from gpu_worker.models.config import ModelConfig

ALPHA = 0.3
"""How much of the difficulty moves from activations (0) to weights (1). Rows keep 10 bits, so that little has to move."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMaxima:
    """The largest magnitude of each input channel of a layer's products, on the calibration text."""

    query_key_value: torch.Tensor
    attention_output: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def smooth_layer(tensors: Mapping[str, torch.Tensor], maxima: LayerMaxima, config: ModelConfig) -> Tensors:
    """The tensors of a layer, named without their prefix, with all four products smoothed."""
    smoothed = dict(tensors)
    _smooth_down(smoothed, maxima.down)
    _smooth_attention_output(smoothed, maxima.attention_output, config)
    attention = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")
    smooth_behind_norm(smoothed, "input_layernorm.weight", attention, maxima.query_key_value)
    gate_up = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
    smooth_behind_norm(smoothed, "post_attention_layernorm.weight", gate_up, maxima.gate_up)
    return smoothed


def smooth_behind_norm(tensors: Tensors, norm: str, weights: tuple[str, ...], largest_inputs: torch.Tensor) -> None:
    """Products whose common input is a norm's output."""
    largest_weights = torch.stack([tensors[name].abs().amax(dim=0) for name in weights]).amax(dim=0)
    factors = _factors(largest_inputs, largest_weights)
    tensors[norm] = tensors[norm] / factors
    for name in weights:
        tensors[name] = tensors[name] * factors


def _smooth_down(tensors: Tensors, largest_inputs: torch.Tensor) -> None:
    factors = _factors(largest_inputs, tensors["mlp.down_proj.weight"].abs().amax(dim=0))
    tensors["mlp.down_proj.weight"] = tensors["mlp.down_proj.weight"] * factors
    _divide_rows(tensors, "mlp.up_proj", factors)


def _smooth_attention_output(tensors: Tensors, largest_inputs: torch.Tensor, config: ModelConfig) -> None:
    """The query heads that share a KV head have its values in common, so their channels have their factors in common."""
    shared = (config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim)
    weight = tensors["self_attn.o_proj.weight"]
    largest_weights = weight.abs().amax(dim=0).view(shared).amax(dim=1)
    factors = _factors(largest_inputs.view(shared).amax(dim=1), largest_weights)
    tensors["self_attn.o_proj.weight"] = weight * factors[:, None].expand(shared).reshape(-1)
    _divide_rows(tensors, "self_attn.v_proj", factors.flatten())


def _divide_rows(tensors: Tensors, projection: str, factors: torch.Tensor) -> None:
    tensors[f"{projection}.weight"] = tensors[f"{projection}.weight"] / factors[:, None]
    if f"{projection}.bias" in tensors:
        tensors[f"{projection}.bias"] = tensors[f"{projection}.bias"] / factors


def _factors(largest_inputs: torch.Tensor, largest_weights: torch.Tensor) -> torch.Tensor:
    """s_j; 1 for channels that are never used."""
    factors = largest_inputs.pow(ALPHA) / largest_weights.pow(1 - ALPHA)
    return torch.where(factors.isfinite() & (factors > 0), factors, 1.0)


def round_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The int8 weight [out, in] within ±LARGEST_WEIGHT, and the scale [out] of its rows."""
    scale = weight.abs().amax(dim=1).clamp(min=torch.finfo(weight.dtype).tiny * LARGEST_WEIGHT) / LARGEST_WEIGHT
    return (weight / scale[:, None]).round().to(torch.int8), scale
