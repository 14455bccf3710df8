"""Turns a GGUF file of the Llama family into safetensors and config.json, dequantized to fp32.

Done here rather than through transformers, which needs accelerate for it and runs the whole model code: names are mapped,
numbers dequantized by the `gguf` package, and the rows of the query and key projections put back in order. GGUF stores them
for rotation of neighbouring pairs; the Llama of transformers rotates halves.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file

from sluice.errors import UserError

_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}

Float32Array = NDArray[np.float32]


class GgufFile:
    """Metadata and tensors of one GGUF file. Raises UserError for what is not a Llama."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader = GGUFReader(path)
        architecture = self.field("general.architecture")
        if architecture != "llama":
            raise UserError(f"{path.name} is a {architecture} model; only llama files can be converted")

    def field(self, name: str) -> Any:
        """Value of a metadata field. Raises UserError when it is absent."""
        found = self._reader.get_field(name)
        if found is None:
            raise UserError(f"{self._path.name} has no field {name}; the file is incomplete or of an unknown kind")
        return found.contents()

    def optional_field(self, name: str, default: Any) -> Any:
        found = self._reader.get_field(name)
        return default if found is None else found.contents()

    @property
    def tensor_names(self) -> list[str]:
        return [tensor.name for tensor in self._reader.tensors]

    def write_weights(self, path: Path, *, on_progress: Callable[[float], None]) -> None:
        """Write all tensors to `path` as fp32; `on_progress` hears the fraction that is done."""
        num_heads = int(self.field("llama.attention.head_count"))
        num_kv_heads = int(self.field("llama.attention.head_count_kv"))
        weights: dict[str, Float32Array] = {}
        for index, tensor in enumerate(self._reader.tensors):
            values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            if tensor.name.endswith("attn_q.weight"):
                values = halves_from_pairs(values, num_heads)
            elif tensor.name.endswith("attn_k.weight"):
                values = halves_from_pairs(values, num_kv_heads)
            weights[tensor_name(tensor.name)] = np.ascontiguousarray(values)
            on_progress((index + 1) / len(self._reader.tensors))
        save_file(weights, path, metadata={"format": "pt"})
        path.chmod(0o644)

    def config(self) -> dict[str, Any]:
        """The content of config.json, as transformers' LlamaConfig reads it."""
        hidden_size = int(self.field("llama.embedding_length"))
        num_heads = int(self.field("llama.attention.head_count"))
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden_size,
            "intermediate_size": int(self.field("llama.feed_forward_length")),
            "num_hidden_layers": int(self.field("llama.block_count")),
            "num_attention_heads": num_heads,
            "num_key_value_heads": int(self.field("llama.attention.head_count_kv")),
            "head_dim": int(self.optional_field("llama.rope.dimension_count", hidden_size // num_heads)),
            "max_position_embeddings": int(self.field("llama.context_length")),
            "vocab_size": len(self.field("tokenizer.ggml.tokens")),
            "rms_norm_eps": float(np.float32(self.field("llama.attention.layer_norm_rms_epsilon"))),
            "rope_theta": float(self.optional_field("llama.rope.freq_base", 10000.0)),
            "rope_scaling": None,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": "output.weight" not in self.tensor_names,
            "bos_token_id": int(self.field("tokenizer.ggml.bos_token_id")),
            "eos_token_id": int(self.field("tokenizer.ggml.eos_token_id")),
            "dtype": "float32",
        }

    def write_config(self, path: Path) -> dict[str, Any]:
        config = self.config()
        path.write_text(json.dumps(config, indent=2) + "\n")
        return config


def tensor_name(gguf_name: str) -> str:
    """The name in transformers of a tensor of a GGUF file. Raises UserError for an unknown one."""
    if gguf_name in _OUTER_NAMES:
        return _OUTER_NAMES[gguf_name]
    prefix, _, rest = gguf_name.partition(".")
    layer, _, part = rest.partition(".")
    if prefix != "blk" or not layer.isdigit() or part not in _LAYER_NAMES:
        raise UserError(f"tensor {gguf_name} is not part of a Llama model; this file cannot be converted")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}"


def halves_from_pairs(weight: Float32Array, num_heads: int) -> Float32Array:
    """Rows of a projection [heads * head_dim, in], per head: from the order of pairs to that of halves (0, 2, … 1, 3, …)."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)
