"""Tiny random models of families that transformers computes for us, and of some that are refused."""

import json
from pathlib import Path

from gpu_worker.artifacts.simulated_model import BOS_TOKEN_ID, EOS_TOKEN_ID, VOCAB_SIZE, write_byte_tokenizer
from service_kit.model_manifest import ModelManifest, content_revision

Fields = dict[str, object]

_VOCABULARY: Fields = {"vocab_size": VOCAB_SIZE, "bos_token_id": BOS_TOKEN_ID, "eos_token_id": EOS_TOKEN_ID}
_COMMON: Fields = {
    **_VOCABULARY,
    "pad_token_id": None,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_EXPERTS: Fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}

# Windows shorter than the sequences of the tests, and softcaps and scales that change every logit.
SERVED: dict[str, tuple[str, Fields]] = {
    "GPT-2": ("gpt2", {**_VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "Gemma 2": (
        "gemma2",
        {
            **_COMMON,
            "head_dim": 16,
            "sliding_window": 11,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 20.0,
        },
    ),
    "Gemma 3": (
        "gemma3_text",
        {
            **_COMMON,
            "num_hidden_layers": 3,
            "head_dim": 24,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "Phi-3": ("phi3", {**_COMMON, "sliding_window": 13}),
    "Mixtral": ("mixtral", {**_COMMON, "num_local_experts": 4}),
    "Qwen3-MoE": ("qwen3_moe", {**_COMMON, **_EXPERTS, "head_dim": 16}),
    "StableLM": ("stablelm", {**_COMMON, "use_qkv_bias": True}),
    "OPT": (
        "opt",
        {
            **_VOCABULARY,
            "pad_token_id": 1,
            "hidden_size": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
            "word_embed_proj_dim": 48,
        },
    ),
    # Keys and values of unequal size.
    "DeepSeek-V3": (
        "deepseek_v3",
        {
            **_COMMON,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
        },
    ),
    # Layers that differ in the size of their heads.
    "Gemma 4": (
        "gemma4_text",
        {
            **_COMMON,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
    ),
}

REFUSED: dict[str, tuple[str, Fields, str]] = {
    "Falcon": ("falcon", {**_VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
               "does not use the attention interface"),
    "Bloom": ("bloom", {**_VOCABULARY, "hidden_size": 64, "n_layer": 2, "n_head": 4},
              "does not use the attention interface"),
    "MPT": ("mpt", {**_VOCABULARY, "d_model": 64, "n_layers": 2, "n_heads": 4}, "does not use the attention interface"),
    "Mamba-2": (
        "mamba2",
        {
            **_VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "state_size": 16,
            "n_groups": 2, "chunk_size": 16,
        },
        "recurrent state",
    ),
    # Whose config has no list of layers.
    "RWKV": ("rwkv", {**_VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2}, "keep a recurrent state"),
    "LFM2": ("lfm2", {**_COMMON, "layer_types": ["conv", "full_attention"]}, "recurrent state"),
    "gpt-oss": ("gpt_oss", {**_COMMON, "head_dim": 16, "num_local_experts": 4, "rope_parameters": {"rope_type": "default",
                "rope_theta": 10000.0}}, "attention sinks"),
    "gpt-oss in MXFP4": ("gpt_oss", {**_COMMON, "head_dim": 16, "num_local_experts": 4, "quantization_config":
                         {"quant_method": "mxfp4"}}, "attention sinks"),
    "Phi-3 with longrope": ("phi3", {**_COMMON, "rope_parameters": _LONGROPE}, "'longrope'.*longest sequence of the batch"),
    "Phi with dynamic NTK": (
        "phi",
        {**_COMMON, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
        "'dynamic'.*longest sequence of the batch",
    ),
    "Llama 4": (
        "llama4_text",
        {**_COMMON, "head_dim": 16, "num_local_experts": 2, "layer_types": ["chunked_attention", "full_attention"]},
        "'chunked_attention' is not paged",
    ),
    "GPT-2 in GPTQ": (
        "gpt2",
        {**SERVED["GPT-2"][1], "quantization_config": {"quant_method": "gptq", "bits": 4}},
        "quantization_config: such weights are not read",
    ),
    "T5": ("t5", {**_VOCABULARY, "d_model": 64, "num_layers": 2, "num_heads": 4}, "has an encoder"),
}  # fmt: skip


def make_tiny_decoder(directory: Path, model_type: str, fields: Fields) -> ModelManifest:
    """A random model with a byte-level tokenizer, with weights large enough that logits differ."""
    import torch  # noqa: PLC0415
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    config = AutoConfig.for_model(model_type, **fields)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in module.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
            else:
                parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    module.save_pretrained(directory)
    return describe(directory)


def make_config_only(directory: Path, model_type: str, fields: Fields) -> ModelManifest:
    """A directory without weights, for models that are refused before any is read."""
    from transformers import AutoConfig  # noqa: PLC0415

    AutoConfig.for_model(model_type, **fields).save_pretrained(directory)
    return describe(directory)


def describe(directory: Path) -> ModelManifest:
    """Tokenizer and manifest beside what is in `directory`."""
    write_byte_tokenizer(directory)
    vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]
    manifest = ModelManifest(
        model="tiny",
        revision=content_revision(directory),
        precision="fp32",
        context_length=96,
        vocab_size=vocab_size,
        bos_token_id=BOS_TOKEN_ID,
        eos_token_ids=(EOS_TOKEN_ID,),
    )
    manifest.write(directory)
    return manifest
