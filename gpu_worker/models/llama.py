"""The Llama family: pre-norm decoder with rotary positions, grouped-query attention and a gated SiLU MLP."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import linear

from gpu_worker.artifacts.weights import load_weights
from gpu_worker.attention.port import StepAttention
from gpu_worker.layers.activation import silu_and_multiply
from gpu_worker.layers.norm import rms_norm
from gpu_worker.layers.rope import RotaryTable, Rotation, inverse_frequencies
from gpu_worker.models.config import ModelConfig

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_FINAL_NORM = "model.norm.weight"
# Buffers that old checkpoints carry and that follow from the config.
_DERIVED = (".rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Linear:
    """Weight [out, in] and bias [out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return linear(rows, self.weight, self.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One decoder layer; products with the same input are fused into one matrix."""

    input_norm: torch.Tensor
    query_key_value: _Linear
    attention_output: _Linear
    mlp_norm: torch.Tensor
    gate_up: _Linear
    down: _Linear


class LlamaModel:
    """Weights on one device, read-only after the constructor. `weights` is emptied, so that fused parts are freed."""

    def __init__(self, config: ModelConfig, weights: dict[str, torch.Tensor]) -> None:
        self.config = config
        self._embedding = weights.pop(_EMBEDDING)
        self._head = self._embedding if config.is_tied else weights.pop(_HEAD)
        self._final_norm = weights.pop(_FINAL_NORM)
        self._layers = [_take_layer(weights, f"model.layers.{index}.") for index in range(config.num_layers)]
        self._rotary_table = RotaryTable(
            inverse_frequencies(config.rope, config.head_dim).to(self._embedding.device),
            num_positions=config.max_position_embeddings,
            dtype=self._embedding.dtype,
        )

    @classmethod
    def load(cls, directory: Path, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> "LlamaModel":
        """The model of `directory`. Raises WeightsError. A tied checkpoint may carry the head; it is not read."""
        ignored = (*_DERIVED, _HEAD) if config.is_tied else _DERIVED
        shapes = tensor_shapes(config)
        weights = load_weights(directory, shapes=shapes, ignored_suffixes=ignored, device=device, dtype=dtype)
        return cls(config, weights)

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: StepAttention) -> torch.Tensor:
        """Hidden states [T, hidden_size] behind the last layer for packed ids and positions [T]."""
        hidden = self._embedding[token_ids]
        rotation = self._rotary_table.at(positions)
        eps = self.config.rms_norm_eps
        for index, layer in enumerate(self._layers):
            hidden = hidden + self._attention(index, layer, rms_norm(hidden, layer.input_norm, eps), rotation, attend)
            gate_up = layer.gate_up(rms_norm(hidden, layer.mlp_norm, eps))
            hidden = hidden + layer.down(silu_and_multiply(gate_up))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits [R, vocab_size] of chosen rows of `forward`'s result."""
        return linear(rms_norm(hidden, self._final_norm, self.config.rms_norm_eps), self._head).float()

    def _attention(
        self, index: int, layer: _Layer, rows: torch.Tensor, rotation: Rotation, attend: StepAttention
    ) -> torch.Tensor:
        num_heads, num_kv_heads, head_dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        heads = layer.query_key_value(rows).view(len(rows), num_heads + 2 * num_kv_heads, head_dim)
        rotated = rotation.apply(heads[:, : num_heads + num_kv_heads])
        value = heads[:, num_heads + num_kv_heads :]
        output = attend(index, rotated[:, :num_heads], rotated[:, num_heads:], value)
        return layer.attention_output(output.reshape(len(rows), num_heads * head_dim))


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint of this config."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (config.vocab_size, hidden), _FINAL_NORM: (hidden,)}
    if not config.is_tied:
        shapes[_HEAD] = (config.vocab_size, hidden)
    attention = {"q_proj": (query, hidden), "k_proj": (key, hidden), "v_proj": (key, hidden), "o_proj": (hidden, query)}
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        for part, matrices, has_bias in (
            ("self_attn", attention, config.has_attention_bias),
            ("mlp", mlp, config.has_mlp_bias),
        ):
            for name, shape in matrices.items():
                shapes[f"{prefix}{part}.{name}.weight"] = shape
                if has_bias:
                    shapes[f"{prefix}{part}.{name}.bias"] = shape[:1]
    return shapes


def _take_layer(weights: dict[str, torch.Tensor], prefix: str) -> _Layer:
    def take_linear(part: str, *names: str) -> _Linear:
        parts = [weights.pop(f"{prefix}{part}.{name}.weight") for name in names]
        biases = [weights.pop(f"{prefix}{part}.{name}.bias", None) for name in names]
        present = [bias for bias in biases if bias is not None]
        return _Linear(weight=_stack(parts), bias=_stack(present) if present else None)

    return _Layer(
        input_norm=weights.pop(f"{prefix}input_layernorm.weight"),
        query_key_value=take_linear("self_attn", "q_proj", "k_proj", "v_proj"),
        attention_output=take_linear("self_attn", "o_proj"),
        mlp_norm=weights.pop(f"{prefix}post_attention_layernorm.weight"),
        gate_up=take_linear("mlp", "gate_proj", "up_proj"),
        down=take_linear("mlp", "down_proj"),
    )


def _stack(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
