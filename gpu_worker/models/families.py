"""What the members of the Llama family differ in, and which fields of config.json each of them understands.

The defaults of absent fields are those of the config classes of transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

# Understood for every member.
COMMON_DEFAULTS: Mapping[str, Any] = {
    "model_type": None,
    "architectures": None,
    "vocab_size": None,
    "hidden_size": None,
    "intermediate_size": None,
    "num_hidden_layers": None,
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": None,
    "rope_scaling": None,
    "rope_parameters": None,
}
# Fields that do not change what the model computes from token ids, or only in training.
WITHOUT_EFFECT = frozenset(
    {
        "_name_or_path", "_model_name_or_path", "_attn_implementation_autoset", "attention_dropout", "bos_token_id",
        "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label", "initializer_range", "is_encoder_decoder",
        "is_llama_config", "label2id", "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp",
        "problem_type", "return_dict", "torch_dtype", "transformers.js_config", "transformers_version", "unk_token_id",
        "use_cache",
    }
)  # fmt: skip
# Fields that a member does not have, but that checkpoints carry to say: not here.
OFF_WHEN_FALSE = frozenset(
    {
        "add_cross_attention", "attention_bias", "is_decoder", "mlp_bias", "rope_interleaved", "tie_encoder_decoder",
        "torchscript", "use_bfloat16", "use_mrope", "use_sliding_window",
    }
)  # fmt: skip

_LAYER_TYPES = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model_type.

    defaults: its own fields beside the common ones, and common ones whose default differs; biases that no field decides are
    told by `projections_with_bias`. window_layers: which layers look through `sliding_window`: all of them, or those that
    layer_types names, which without a list are those from max_window_layers on, or those without rotation.
    """

    architecture: str
    defaults: Mapping[str, Any]
    projections_with_bias: frozenset[str] = frozenset()
    has_qk_norm: bool = False
    window_layers: Literal["none", "all", "behind max_window_layers", "without rotation"] = "none"
    default_theta: float = 10000.0

    def understands(self, name: str) -> bool:
        return name in COMMON_DEFAULTS or name in self.defaults or name in WITHOUT_EFFECT


FAMILIES: Mapping[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM", defaults={"attention_bias": False, "mlp_bias": False}),
    "mistral": Family(
        architecture="MistralForCausalLM",
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
        window_layers="all",
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        defaults={**_LAYER_TYPES, "num_key_value_heads": 32},
        projections_with_bias=frozenset({"q_proj", "k_proj", "v_proj"}),
        window_layers="behind max_window_layers",
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        defaults={**_LAYER_TYPES, "num_key_value_heads": 32, "head_dim": 128, "attention_bias": False},
        has_qk_norm=True,
        window_layers="behind max_window_layers",
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        defaults={
            "use_sliding_window": False,
            "sliding_window": None,
            "layer_types": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
        },
        window_layers="without rotation",
        default_theta=2000000.0,
    ),
}
