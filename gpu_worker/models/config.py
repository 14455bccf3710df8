"""Reads config.json of a Llama-family model. Pure but for reading the file.

Only what the native model computes is accepted; any other field or value is refused by name, because a field that is
ignored gives wrong text without an error.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_worker.layers.rope_config import RopeConfig
from service_kit.model_manifest import ModelFilesError


class UnsupportedModelError(ModelFilesError):
    """The native engine does not compute this model; `field` names the config field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"config.json: {field}: {message}")
        self.field = field


# Fields that do not change what the model computes from token ids, or only in training.
_WITHOUT_EFFECT = frozenset(
    {
        "_name_or_path", "_model_name_or_path", "architectures", "attention_dropout", "bos_token_id", "eos_token_id",
        "pad_token_id", "dtype", "torch_dtype", "initializer_range", "transformers_version", "use_cache", "pretraining_tp",
        "is_llama_config", "transformers.js_config", "unk_token_id", "id2label", "label2id", "chunk_size_feed_forward",
        "is_encoder_decoder", "output_attentions", "output_hidden_states", "return_dict",
    }
)  # fmt: skip
_READ = frozenset(
    {
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act", "tie_word_embeddings", "attention_bias",
        "mlp_bias", "rope_theta", "rope_scaling", "rope_parameters", "model_type",
    }
)  # fmt: skip
_ROPE_FIELDS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a Llama-family decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    is_tied: bool
    has_attention_bias: bool
    has_mlp_bias: bool
    rope: RopeConfig

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """KV memory of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value


def read_model_config(directory: Path) -> ModelConfig:
    """The config of the model in `directory`. Raises ModelFilesError, UnsupportedModelError for what is not computed."""
    path = directory / "config.json"
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{path}: not readable: {error}") from error
    if not isinstance(fields, dict):
        raise ModelFilesError(f"{path}: not a JSON object")
    return parse_model_config(fields)


def parse_model_config(fields: Mapping[str, Any]) -> ModelConfig:
    """Raises UnsupportedModelError naming the first field that is missing, malformed or not computed."""
    _refuse_what_is_not_computed(fields)
    hidden_size = _positive(fields, "hidden_size")
    num_heads = _positive(fields, "num_attention_heads")
    num_kv_heads = _positive(fields, "num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModelError("num_key_value_heads", f"{num_heads} heads are not a multiple of {num_kv_heads}")
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise UnsupportedModelError("hidden_size", f"{hidden_size} is not a multiple of {num_heads} heads")
    head_dim = _positive(fields, "head_dim", default=hidden_size // num_heads)
    if head_dim % 2:
        raise UnsupportedModelError("head_dim", f"{head_dim} is odd, rotary embedding needs pairs")
    return ModelConfig(
        vocab_size=_positive(fields, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(fields, "intermediate_size"),
        num_layers=_positive(fields, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_positive(fields, "max_position_embeddings"),
        rms_norm_eps=_number(fields, "rms_norm_eps", default=1e-6),
        is_tied=_flag(fields, "tie_word_embeddings"),
        has_attention_bias=_flag(fields, "attention_bias"),
        has_mlp_bias=_flag(fields, "mlp_bias"),
        rope=_parse_rope(fields),
    )


def _refuse_what_is_not_computed(fields: Mapping[str, Any]) -> None:
    if fields.get("model_type") != "llama":
        raise UnsupportedModelError("model_type", f"{fields.get('model_type')!r} is not computed, only 'llama'")
    architectures = fields.get("architectures") or ["LlamaForCausalLM"]
    if architectures != ["LlamaForCausalLM"]:
        raise UnsupportedModelError("architectures", f"{architectures!r} is not computed, only ['LlamaForCausalLM']")
    if fields.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError("hidden_act", f"{fields['hidden_act']!r} is not computed, only 'silu'")
    for name, value in fields.items():
        # A field of None or False says that a feature is off.
        if name not in _READ | _WITHOUT_EFFECT and value is not None and value is not False:
            raise UnsupportedModelError(name, f"{value!r} is not understood")


def _parse_rope(fields: Mapping[str, Any]) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (before)."""
    source = "rope_parameters" if fields.get("rope_parameters") is not None else "rope_scaling"
    rope = fields.get(source) or {}
    if not isinstance(rope, Mapping):
        raise UnsupportedModelError(source, "not an object")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in _ROPE_FIELDS:
        raise UnsupportedModelError(
            f"{source}.rope_type", f"{rope_type!r} is not computed, only {sorted(_ROPE_FIELDS)}"
        )
    for name in rope.keys() - {"rope_theta", "rope_type", "type"} - _ROPE_FIELDS[rope_type]:
        if rope[name] is not None and not (name == "partial_rotary_factor" and rope[name] == 1):
            raise UnsupportedModelError(f"{source}.{name}", f"{rope[name]!r} has no meaning for rope type {rope_type}")
    theta = rope if rope.get("rope_theta") is not None else fields
    needed = {name: _number(rope, name, prefix=f"{source}.") for name in _ROPE_FIELDS[rope_type]}
    return RopeConfig(
        rope_type=rope_type,
        theta=_number(theta, "rope_theta", default=10000.0),
        factor=needed.get("factor", 1.0),
        low_freq_factor=needed.get("low_freq_factor", 1.0),
        high_freq_factor=needed.get("high_freq_factor", 1.0),
        original_context_length=int(needed.get("original_max_position_embeddings", 0)),
    )


def _positive(fields: Mapping[str, Any], name: str, *, default: int | None = None) -> int:
    value = fields.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModelError(name, f"{value!r} is not a positive whole number")
    return value


def _number(fields: Mapping[str, Any], name: str, *, default: float | None = None, prefix: str = "") -> float:
    value = fields.get(name)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise UnsupportedModelError(prefix + name, f"{value!r} is not a positive number")
    return float(value)


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise UnsupportedModelError(name, f"{value!r} is not true or false")
    return value
