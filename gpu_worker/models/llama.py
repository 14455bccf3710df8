"""The Llama family: pre-norm decoder with rotary positions, grouped-query attention and a gated SiLU MLP.

Its members differ in biases, norms of single heads, windows and the layers that turn: all of it is data of ModelConfig.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from gpu_worker.artifacts.checkpoints import open_checkpoint
from gpu_worker.attention.port import StepAttention
from gpu_worker.kernels.layer import AddressedStep, LayerWeights, WholeLayers
from gpu_worker.layers.linear.factory import LinearFactory
from gpu_worker.layers.linear.fp32 import Fp32Linear
from gpu_worker.layers.linear.int8 import Int8Linear
from gpu_worker.layers.linear.port import Linear, MakeLinear
from gpu_worker.layers.norm import Norm, rms_norm
from gpu_worker.layers.rope import RotaryTable, Rotation
from gpu_worker.layers.rope_frequencies import inverse_frequencies
from gpu_worker.models.config import ModelConfig
from gpu_worker.models.llama_tensors import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    ignored_suffixes,
    int8_names,
    layer_prefix,
    layer_shapes,
    scale_name,
    tensor_shapes,
    with_scales,
)

ReadTensors = Callable[[Iterable[str]], dict[str, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaLayer:
    """One decoder layer; products with the same input are fused into one matrix."""

    input_norm: Norm
    query_key_value: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    is_rotary: bool
    attention_output: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.query_key_value, self.attention_output, self.gate_up, self.down)


class LlamaModel:
    """Weights on one device, read-only after the constructor.

    They are read layer by layer and dropped where a linear has packed them, so that there is one copy of each and little
    more at any time. A tied embedding is the exception: it is looked up and, packed, multiplied with.
    """

    def __init__(self, config: ModelConfig, read: ReadTensors, make_linear: MakeLinear) -> None:
        self.config = config
        self.head = _make_head(config, read, make_linear)
        self._embedding = _own(read([EMBEDDING])[EMBEDDING])
        self._final_norm = Norm(weight=_own(read([FINAL_NORM])[FINAL_NORM]), eps=config.rms_norm_eps)
        # After the head: packing it needs more memory for a while than anything else, and less is held yet.
        self.layers = [_make_layer(config, index, read, make_linear) for index in range(config.num_layers)]
        self.whole_layers = _find_whole_layers(config, self.layers)
        self._rotary_table = RotaryTable(
            inverse_frequencies(config.rope, config.head_dim).to(self._embedding.device),
            num_positions=config.max_position_embeddings,
            dtype=self._embedding.dtype,
            scale=config.rope.attention_factor,
        )

    @classmethod
    def load(
        cls,
        model: Path,
        config: ModelConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        make_linear: MakeLinear | None = None,
    ) -> "LlamaModel":
        """The model of a directory or GGUF file. Raises WeightsError, GgufError. A tied checkpoint may carry the head; it is not read."""
        quantized = int8_names(config) if config.is_int8 else frozenset()
        checkpoint = open_checkpoint(
            model,
            shapes=with_scales(tensor_shapes(config), quantized),
            ignored_suffixes=ignored_suffixes(config),
            int8_names=quantized,
        )
        return cls(config, partial(checkpoint.read, device=device, dtype=dtype), make_linear or LinearFactory())

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def is_batch_invariant(self) -> bool:
        """Whether every matrix product is; the rest of the model works row by row."""
        linears = [self.head, *(linear for layer in self.layers for linear in layer.linears)]
        return all(linear.is_batch_invariant for linear in linears)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: StepAttention,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states [R, hidden_size] behind the last layer, of the chosen rows of packed ids and positions [T]."""
        hidden = self._embedding[token_ids]
        rotation = self._rotary_table.at(positions)
        if self.whole_layers is not None and isinstance(attend, AddressedStep):
            delta: torch.Tensor | None = self.whole_layers.run(hidden, rotation.turns, attend)
        else:
            delta = self._run_layers(hidden, rotation, attend)
        hidden = hidden if delta is None else hidden.add_(delta)
        return hidden if rows is None else hidden[rows]

    def _run_layers(self, hidden: torch.Tensor, rotation: Rotation, attend: StepAttention) -> torch.Tensor | None:
        delta: torch.Tensor | None = None  # what is still to be added to hidden
        for index, layer in enumerate(self.layers):
            delta = self._attention(
                index, layer.query_key_value.after_norm(hidden, delta, layer.input_norm), rotation, attend
            )
            gate_up = layer.gate_up.after_norm(hidden, delta, layer.mlp_norm)
            delta = layer.down.after_gate(gate_up)
        return delta

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits [R, vocab_size] of rows of `forward`'s result."""
        return self.head.after_norm(hidden, None, self._final_norm).float()

    def _attention(self, index: int, fused: torch.Tensor, rotation: Rotation, attend: StepAttention) -> torch.Tensor:
        """Of queries, keys and values [T, …] as the fused product gives them."""
        layer, config = self.layers[index], self.config
        num_turned = config.num_heads + config.num_kv_heads
        heads = fused.view(len(fused), num_turned + config.num_kv_heads, config.head_dim)
        query, key, value = heads[:, : config.num_heads], heads[:, config.num_heads : num_turned], heads[:, num_turned:]
        if layer.query_norm is not None and layer.key_norm is not None:
            rms_norm(query, layer.query_norm, config.rms_norm_eps, out=query)
            rms_norm(key, layer.key_norm, config.rms_norm_eps, out=key)
        if layer.is_rotary:
            rotation.apply(heads[:, :num_turned])
        output = attend(index, query, key, value)
        return layer.attention_output(output.reshape(len(fused), config.num_heads * config.head_dim))


def _make_head(config: ModelConfig, read: ReadTensors, make_linear: MakeLinear) -> Linear:
    if not config.is_int8:
        name = EMBEDDING if config.is_tied else HEAD
        return make_linear(read([name])[name], None)
    tensors = read([HEAD, scale_name(HEAD)])
    return make_linear(tensors[HEAD], None, tensors[scale_name(HEAD)])


def _make_layer(config: ModelConfig, index: int, read: ReadTensors, make_linear: MakeLinear) -> LlamaLayer:
    shapes, prefix = layer_shapes(config, index), layer_prefix(index)
    weights = read(with_scales(shapes, int8_names(config)) if config.is_int8 else shapes)

    def take_linear(part: str, *names: str) -> Linear:
        parts = [weights.pop(f"{prefix}{part}.{name}.weight") for name in names]
        biases = [weights.pop(f"{prefix}{part}.{name}.bias", None) for name in names]
        scales = [weights.pop(scale_name(f"{prefix}{part}.{name}.weight"), None) for name in names]
        return make_linear(_stack(parts), _stack_present(biases), _stack_present(scales))

    return LlamaLayer(
        input_norm=Norm(weight=_own(weights.pop(f"{prefix}input_layernorm.weight")), eps=config.rms_norm_eps),
        query_key_value=take_linear("self_attn", "q_proj", "k_proj", "v_proj"),
        query_norm=_own(weights.pop(f"{prefix}self_attn.q_norm.weight")) if config.has_qk_norm else None,
        key_norm=_own(weights.pop(f"{prefix}self_attn.k_norm.weight")) if config.has_qk_norm else None,
        is_rotary=config.are_rotary[index],
        attention_output=take_linear("self_attn", "o_proj"),
        mlp_norm=Norm(weight=_own(weights.pop(f"{prefix}post_attention_layernorm.weight")), eps=config.rms_norm_eps),
        gate_up=take_linear("mlp", "gate_proj", "up_proj"),
        down=take_linear("mlp", "down_proj"),
    )


def _find_whole_layers(config: ModelConfig, layers: list[LlamaLayer]) -> WholeLayers | None:
    """The layers as single calls, if one of our kernels makes all their products; with nothing of their memory twice."""
    for kind in (Int8Linear, Fp32Linear):
        linears = [[linear for linear in layer.linears if isinstance(linear, kind)] for layer in layers]
        if all(len(ours) == len(layer.linears) for ours, layer in zip(linears, layers, strict=True)):
            weights = [_whole_layer(layer, ours) for ours, layer in zip(linears, layers, strict=True)]
            heads = (config.num_heads, config.num_kv_heads, config.head_dim)
            return WholeLayers(linears[0][0].kernels, weights, heads=heads, eps=config.rms_norm_eps)
    return None


def _whole_layer(layer: LlamaLayer, linears: Sequence[Int8Linear | Fp32Linear]) -> LayerWeights:
    query_key_value, attention_output, gate_up, down = (linear.packed for linear in linears)
    return LayerWeights(
        query_key_value=query_key_value,
        attention_output=attention_output,
        gate_up=gate_up,
        down=down,
        input_norm=layer.input_norm.weight,
        mlp_norm=layer.mlp_norm.weight,
        query_norm=layer.query_norm,
        key_norm=layer.key_norm,
        is_rotary=layer.is_rotary,
    )


def _stack(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _stack_present(tensors: list[torch.Tensor | None]) -> torch.Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    return _stack(present) if present else None


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that does not keep the file mapped."""
    return tensor.clone()
