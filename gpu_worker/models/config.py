"""Reads config.json of a Llama-family model. Pure but for reading the file.

Only what the native model computes is accepted; any other field or value is refused by name, because a field that is
ignored gives wrong text without an error.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_worker.artifacts.gguf_config import config_fields, key_of_field
from gpu_worker.layers.rope_config import RopeConfig
from gpu_worker.models.config_fields import ConfigFields, UnsupportedModelError
from gpu_worker.models.families import COMMON_DEFAULTS, FAMILIES, OFF_WHEN_FALSE, Family
from gpu_worker.models.rope_fields import parse_rope
from service_kit.gguf.files import is_gguf
from service_kit.gguf.header import read_header
from service_kit.model_manifest import ModelFilesError

__all__ = ["ModelConfig", "UnsupportedModelError", "parse_model_config", "read_model_config"]

_ATTENTION_PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
_MLP_PROJECTIONS = frozenset({"gate_proj", "up_proj", "down_proj"})
_IS_SLIDING_BY_TYPE = {"full_attention": False, "sliding_attention": True}


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
    projections_with_bias: frozenset[str]
    """Names, as in checkpoints: q_proj, down_proj, …"""
    has_qk_norm: bool
    """Whether each head of query and key is normalised before it is turned."""
    windows: tuple[int | None, ...]
    """Sliding window of each layer, as in AttentionShape."""
    are_rotary: tuple[bool, ...]
    """Which layers turn query and key by position."""
    rope: RopeConfig
    is_int8: bool = False
    """Whether the weights of matrix products are int8 with scales; the manifest says so, not config.json."""

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """KV memory of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value


def read_model_config(model: Path) -> ModelConfig:
    """The config of a model directory or GGUF file. Raises ModelFilesError, UnsupportedModelError for what is not
    computed."""
    if is_gguf(model):
        return _config_of_gguf(model)
    path = model / "config.json"
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{path}: not readable: {error}") from error
    if not isinstance(fields, dict):
        raise ModelFilesError(f"{path}: not a JSON object")
    return parse_model_config(fields)


def _config_of_gguf(path: Path) -> ModelConfig:
    header = read_header(path)
    try:
        return parse_model_config(config_fields(header))
    except UnsupportedModelError as error:
        raise header.unsupported(key_of_field(header, error.field), error.reason) from error


def parse_model_config(values: Mapping[str, Any]) -> ModelConfig:
    """Raises UnsupportedModelError naming the first field that is missing, malformed or not computed."""
    family = _family(values)
    fields = ConfigFields(values=values, defaults={**COMMON_DEFAULTS, **family.defaults})
    _refuse_what_is_not_computed(fields, family)
    num_layers, max_position_embeddings = fields.whole("num_hidden_layers"), fields.whole("max_position_embeddings")
    num_heads, num_kv_heads, head_dim = _heads(fields)
    are_rotary = _are_rotary(fields, num_layers)
    return ModelConfig(
        vocab_size=fields.whole("vocab_size"),
        hidden_size=fields.whole("hidden_size"),
        intermediate_size=fields.whole("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=fields.number("rms_norm_eps"),
        is_tied=fields.flag("tie_word_embeddings"),
        projections_with_bias=family.projections_with_bias
        | (_ATTENTION_PROJECTIONS if fields.flag("attention_bias") else frozenset())
        | (_MLP_PROJECTIONS if fields.flag("mlp_bias") else frozenset()),
        has_qk_norm=family.has_qk_norm,
        windows=_windows(fields, family, are_rotary),
        are_rotary=are_rotary,
        rope=parse_rope(fields, default_theta=family.default_theta, max_position_embeddings=max_position_embeddings),
    )


def _family(values: Mapping[str, Any]) -> Family:
    model_type = values.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedModelError("model_type", f"{model_type!r} is not computed, only {sorted(FAMILIES)}")
    return family


def _refuse_what_is_not_computed(fields: ConfigFields, family: Family) -> None:
    for name, only in (("architectures", [family.architecture]), ("hidden_act", "silu")):
        value = fields.value(name)
        if value != only and not (name == "architectures" and not value):
            raise fields.refuse(name, f"{value!r} is not computed, only {only!r}")
    for name, value in fields.values.items():
        is_off = value is None or (value is False and name in OFF_WHEN_FALSE)
        if not is_off and not family.understands(name):
            raise fields.refuse(name, f"{value!r} is not understood")


def _heads(fields: ConfigFields) -> tuple[int, int, int]:
    """Heads, KV heads, and the size of a head."""
    hidden_size, num_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    num_kv_heads = fields.whole_or_none("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise fields.refuse("num_key_value_heads", f"{num_heads} heads are not a multiple of {num_kv_heads}")
    head_dim = fields.whole_or_none("head_dim")
    if head_dim is None:
        if hidden_size % num_heads:
            raise fields.refuse("hidden_size", f"{hidden_size} is not a multiple of {num_heads} heads")
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise fields.refuse("head_dim", f"{head_dim} is odd, rotary embedding needs pairs")
    return num_heads, num_kv_heads, head_dim


def _are_rotary(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """`no_rope_layers` has a 1 for each layer that does turn."""
    if "no_rope_layers" not in fields.defaults:
        return (True,) * num_layers
    marks = fields.per_layer("no_rope_layers", num_layers)
    if marks is None:
        interval = fields.whole("no_rope_layer_interval")
        return tuple((index + 1) % interval != 0 for index in range(num_layers))
    if not set(marks) <= {0, 1}:
        raise fields.refuse("no_rope_layers", f"{marks!r} has entries other than 0 and 1")
    return tuple(mark == 1 for mark in marks)


def _windows(fields: ConfigFields, family: Family, are_rotary: tuple[bool, ...]) -> tuple[int | None, ...]:
    num_layers = len(are_rotary)
    is_used = family.window_layers == "all" or fields.flag("use_sliding_window")
    window = fields.whole_or_none("sliding_window") if is_used else None
    types = fields.per_layer("layer_types", num_layers)
    if types is not None:
        are_sliding = [_is_sliding(fields, layer_type) for layer_type in types]
        if any(are_sliding) and window is None:
            raise fields.refuse("layer_types", "sliding_attention without use_sliding_window and sliding_window")
    else:
        are_sliding = _sliding_by_default(fields, family, are_rotary)
    return tuple(window if is_sliding else None for is_sliding in are_sliding)


def _is_sliding(fields: ConfigFields, layer_type: Any) -> bool:
    if not isinstance(layer_type, str) or layer_type not in _IS_SLIDING_BY_TYPE:
        raise fields.refuse("layer_types", f"{layer_type!r} is not one of {sorted(_IS_SLIDING_BY_TYPE)}")
    return _IS_SLIDING_BY_TYPE[layer_type]


def _sliding_by_default(fields: ConfigFields, family: Family, are_rotary: tuple[bool, ...]) -> list[bool]:
    match family.window_layers:
        case "none":
            return [False for _ in are_rotary]
        case "all":
            return [True for _ in are_rotary]
        case "without rotation":
            return [not is_rotary for is_rotary in are_rotary]
        case "behind max_window_layers":
            first = fields.value("max_window_layers")
            if not isinstance(first, int) or isinstance(first, bool) or first < 0:
                raise fields.refuse("max_window_layers", f"{first!r} is not a whole number from 0 on")
            return [index >= first for index in range(len(are_rotary))]
