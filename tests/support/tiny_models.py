"""Model directories made on the spot: tiny random models of the Llama family, and simulated models without weights."""

import json
from pathlib import Path

from gpu_worker.artifacts.simulated_model import (
    BOS_TOKEN_ID,
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    write_byte_tokenizer,
    write_simulated_model,
)
from service_kit.model_manifest import ModelManifest, content_revision

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "factor": 2.0}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def make_simulated_model(directory: Path, *, context_length: int = 4096, name: str = "simulated") -> ModelManifest:
    """A model for the simulated engine in `directory`."""
    return write_simulated_model(directory, name=name, context_length=context_length)


def make_tiny_llama(
    directory: Path,
    *,
    name: str = "tiny-llama",
    num_heads: int = 4,
    num_kv_heads: int = 2,
    tied: bool = False,
    rope: dict[str, object] | None = None,
    attention_bias: bool = False,
    vocab_size: int = VOCAB_SIZE,
    context_length: int = 256,
    max_shard_size: str = "5GB",
    seed: int = 0,
) -> ModelManifest:
    """A random LlamaForCausalLM of two layers; as make_tiny_model. Token ids from 258 on have no text."""
    return make_tiny_model(
        directory,
        "llama",
        name=name,
        context_length=context_length,
        max_shard_size=max_shard_size,
        seed=seed,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        tie_word_embeddings=tied,
        attention_bias=attention_bias,
        vocab_size=vocab_size,
        **({} if rope is None else {"rope_parameters": rope}),
    )


def make_tiny_model(
    directory: Path,
    model_type: str,
    *,
    name: str = "tiny",
    context_length: int = 256,
    max_shard_size: str = "5GB",
    seed: int = 0,
    **fields: object,
) -> ModelManifest:
    """A random model of two layers with a byte-level tokenizer in `directory`, written by transformers.

    `fields` are those of the config class of `model_type`. The weights are large enough that logits differ (standard
    deviation at least 1), so that a wrong computation changes the greedy output; norms and biases are random too.
    """
    # Loaded here: the tests that need only a simulated model run without torch.
    import torch  # noqa: PLC0415
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    directory.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.for_model(model_type, **_tiny_fields(context_length, fields))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(".bias"):
                parameter.normal_(std=0.2)
            elif "norm" in parameter_name:
                parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    write_byte_tokenizer(directory)
    manifest = ModelManifest(
        model=name,
        revision=content_revision(directory),
        precision="fp32",
        context_length=context_length,
        vocab_size=config.vocab_size,
        bos_token_id=BOS_TOKEN_ID,
        eos_token_ids=(EOS_TOKEN_ID,),
    )
    manifest.write(directory)
    return manifest


def quantize_tiny(directory: Path) -> Path:
    """The int8 form of a tiny model, in a directory beside it."""
    from gpu_worker.artifacts.quantize import quantize_directory  # noqa: PLC0415

    target = directory.with_name(f"{directory.name}-int8")
    target.mkdir()
    quantize_directory(directory, target, name=target.name)
    return target


def _tiny_fields(context_length: int, fields: dict[str, object]) -> dict[str, object]:
    rope = fields.get("rope_parameters") or {}
    assert isinstance(rope, dict)
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context_length,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": None,
        **fields,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", **rope},
    }


def encode(text: str) -> tuple[int, ...]:
    """The tokens of `text` in the byte-level tokenizer, without BOS."""
    return tuple(text.encode())


def read_config(directory: Path) -> dict[str, object]:
    """The config.json of a model directory."""
    fields: dict[str, object] = json.loads((directory / "config.json").read_text())
    return fields
