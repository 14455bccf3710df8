"""The metadata of a GGUF file as the fields of a config.json. Pure but for reading the file.

Only what is understood is accepted; any other key of the architecture is refused by name, because a key that is ignored
gives wrong text without an error.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from service_kit.gguf.header import GgufHeader
from service_kit.gguf.identity import EMBEDDING, context_length
from service_kit.gguf.vocabulary import read_vocabulary

ROPE_DIVISORS = "rope_freqs.weight"
HEAD = "output.weight"
# Where the fields that may still be refused come from, as fields of config.json and keys without the architecture's name.
_KEY_BY_FIELD: Mapping[str, str] = {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "rope_scaling.factor": "rope.scaling.factor",
    "rope_scaling.beta_fast": "rope.scaling.yarn_beta_fast",
    "rope_scaling.beta_slow": "rope.scaling.yarn_beta_slow",
}
# Keys that every architecture may have, without its name in front.
_UNDERSTOOD = frozenset(
    {
        "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size",
        "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
        "attention.layer_norm_rms_epsilon", "attention.sliding_window", "rope.dimension_count", "rope.freq_base",
        "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
        "rope.scaling.finetuned", "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    }
)  # fmt: skip
# Keys that may be there when they say: not here.
_NEUTRAL: Mapping[str, frozenset[Any]] = {
    "expert_count": frozenset({0}),
    "expert_used_count": frozenset({0}),
    "attention.causal": frozenset({True}),
    "attention.scale": frozenset({0.0}),
    "rope.scaling.yarn_ext_factor": frozenset({-1.0, 1.0}),
    "attention.clamp_kqv": frozenset({0.0}),
    "logit_scale": frozenset({0.0, 1.0}),
    "residual_scale": frozenset({0.0, 1.0}),
    "embedding_scale": frozenset({0.0, 1.0}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFamily:
    """One architecture of GGUF. `turns_pairs`: whether its rows of queries and keys are in the order of turned pairs, and
    not of halves."""

    model_type: str
    class_name: str
    turns_pairs: bool = False
    has_window: bool = False


GGUF_FAMILIES: Mapping[str, GgufFamily] = {
    "llama": GgufFamily(model_type="llama", class_name="LlamaForCausalLM", turns_pairs=True, has_window=True),
    "qwen2": GgufFamily(model_type="qwen2", class_name="Qwen2ForCausalLM"),
    "qwen3": GgufFamily(model_type="qwen3", class_name="Qwen3ForCausalLM"),
    "smollm3": GgufFamily(model_type="smollm3", class_name="SmolLM3ForCausalLM", turns_pairs=True),
}
_WITH_WINDOW = GgufFamily(model_type="mistral", class_name="MistralForCausalLM", turns_pairs=True, has_window=True)


def gguf_family(header: GgufHeader) -> GgufFamily:
    """Raises UnsupportedGgufError."""
    kind = header.metadata.get("general.type", "model")
    if kind != "model":
        raise header.unsupported("general.type", f"{kind!r} is not a model of its own; name the file of the model")
    found = GGUF_FAMILIES.get(header.architecture)
    if found is None:
        raise header.unsupported(
            "general.architecture",
            f"{header.architecture!r} is not served from GGUF, only {', '.join(GGUF_FAMILIES)}; "
            "the same model may be served from its safetensors files",
        )
    return found


def config_fields(header: GgufHeader) -> dict[str, Any]:
    """What config.json would hold. Raises GgufError."""
    family, keys = gguf_family(header), _Keys(header=header, prefix=f"{header.architecture}.")
    keys.refuse_unknown()
    window = keys.whole_or_none("attention.sliding_window")
    if window and not family.has_window:
        raise header.unsupported(f"{keys.prefix}attention.sliding_window", f"{window} is not computed here")
    if window and window >= context_length(header):
        window = None  # it hides nothing
    if window:
        family = _WITH_WINDOW
    num_heads, head_dim = keys.whole("attention.head_count"), _head_dim(keys)
    vocabulary = read_vocabulary(header)
    if EMBEDDING not in header.tensors:
        raise header.refuse(EMBEDDING, "missing")
    return {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "hidden_size": keys.whole("embedding_length"),
        "intermediate_size": keys.whole("feed_forward_length"),
        "num_hidden_layers": _num_layers(keys),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.whole_or_none("attention.head_count_kv") or num_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context_length(header),
        "vocab_size": header.tensors[EMBEDDING].shape[0],
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        **_rope(keys, head_dim),
        "hidden_act": "silu",
        **_biases(header, family),
        "attention_dropout": 0.0,
        "tie_word_embeddings": HEAD not in header.tensors,
        **({"sliding_window": window} if window else {}),
        "bos_token_id": vocabulary.bos_id(header),
        "eos_token_id": header.whole_or_none("tokenizer.ggml.eos_token_id"),
        "dtype": "float32",
    }


def key_of_field(header: GgufHeader, field: str) -> str:
    """The key that a field of `config_fields` was read from."""
    return f"{header.architecture}.{_KEY_BY_FIELD.get(field, field)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Keys:
    """The keys of an architecture by their names without it."""

    header: GgufHeader
    prefix: str

    def refuse_unknown(self) -> None:
        for key, value in self.header.metadata.items():
            name = key.removeprefix(self.prefix)
            if name == key or name in _UNDERSTOOD:
                continue
            if isinstance(value, list) or value not in _NEUTRAL.get(name, ()):
                raise self.header.unsupported(key, f"{value!r:.50} is not understood; serve the safetensors files")

    def whole(self, name: str) -> int:
        value = self.header.whole(self.prefix + name)
        if value < 1:
            raise self.header.refuse(self.prefix + name, f"{value} is not above 0")
        return value

    def whole_or_none(self, name: str) -> int | None:
        return self.header.whole_or_none(self.prefix + name)

    def number(self, name: str) -> float:
        return self.header.number(self.prefix + name)

    def number_or_none(self, name: str) -> float | None:
        return self.number(name) if self.prefix + name in self.header.metadata else None


def _num_layers(keys: _Keys) -> int:
    """No more than there are tensors of: a description of each tensor is made of this number."""
    count = keys.whole("block_count")
    if not any(name.startswith(f"blk.{count - 1}.") for name in keys.header.tensors):
        raise keys.header.refuse(f"{keys.prefix}block_count", f"{count}, but there is no tensor of the last layer")
    return count


def _head_dim(keys: _Keys) -> int:
    """Refuses heads of which only a part is turned, and values of another size."""
    even = keys.whole("embedding_length") // keys.whole("attention.head_count")
    head_dim = keys.whole_or_none("attention.key_length") or even
    for name in ("attention.value_length", "rope.dimension_count"):
        value = keys.whole_or_none(name)
        if value not in (None, head_dim):
            raise keys.header.unsupported(keys.prefix + name, f"{value}, where heads have {head_dim} numbers")
    return head_dim


def _rope(keys: _Keys, head_dim: int) -> dict[str, Any]:
    """rope_theta, and rope_scaling for positions that are stretched.

    llama.cpp multiplies the magnitude of any rotation by `attn_factor`; transformers takes it for the whole magnitude of yarn.
    """
    for name in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
        if keys.number_or_none(name) not in (None, 1.0):
            raise keys.header.unsupported(keys.prefix + name, f"{keys.number(name)} is not computed, only 1")
    theta = keys.number_or_none("rope.freq_base") or 10000.0
    has_type = f"{keys.prefix}rope.scaling.type" in keys.header.metadata
    kind = keys.header.text(f"{keys.prefix}rope.scaling.type") if has_type else "none"
    factor = keys.number_or_none("rope.scaling.factor") or keys.number_or_none("rope.scale_linear") or 1.0
    if kind == "none" and factor != 1 and not has_type:
        kind = "linear"
    scaling: dict[str, Any] | None = None
    if kind == "linear" and factor != 1:
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        scaling = _yarn(keys, factor)
    elif kind not in ("none", "linear"):
        raise keys.header.unsupported(f"{keys.prefix}rope.scaling.type", f"{kind!r} is not computed")
    if ROPE_DIVISORS in keys.header.tensors:
        if scaling is not None:
            raise keys.header.unsupported(ROPE_DIVISORS, f"beside {kind} scaling; only one of them is computed")
        scaling = {"rope_type": "divided", "divisors": _divisors(keys.header, head_dim // 2)}
    return {"rope_theta": theta, "rope_scaling": scaling}


def _divisors(header: GgufHeader, count: int) -> list[float]:
    found = header.floats_of(ROPE_DIVISORS) if header.tensors[ROPE_DIVISORS].shape == (count,) else ()
    if not found or not all(0 < each < float("inf") for each in found):
        raise header.unsupported(ROPE_DIVISORS, f"not {count} positive numbers")
    return list(found)


def _yarn(keys: _Keys, factor: float) -> dict[str, Any]:
    fields = {
        "factor": factor,
        "original_max_position_embeddings": keys.whole("rope.scaling.original_context_length"),
        "beta_fast": keys.number_or_none("rope.scaling.yarn_beta_fast"),
        "beta_slow": keys.number_or_none("rope.scaling.yarn_beta_slow"),
    }
    return {"rope_type": "yarn", **{name: value for name, value in fields.items() if value is not None}}


def _biases(header: GgufHeader, family: GgufFamily) -> dict[str, Any]:
    """From the tensors that are there; a family that always or never has some has no field for it."""
    has_attention, has_mlp = (any(f"blk.0.{part}.bias" in header.tensors for part in parts) for parts in (
        ("attn_q", "attn_k", "attn_v", "attn_output"), ("ffn_gate", "ffn_up", "ffn_down")))  # fmt: skip
    match family.model_type:
        case "llama" | "smollm3":
            return {"attention_bias": has_attention, "mlp_bias": has_mlp}
        case "qwen3":
            return {"attention_bias": has_attention}
        case _:
            return {}
