"""A Llama of random weights in a directory, made from a config: its speed is that of a trained one, nothing is downloaded."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from gpu_worker.artifacts.simulated_model import BOS_TOKEN_ID, EOS_TOKEN_ID, write_byte_tokenizer
from gpu_worker.models.config import read_model_config
from gpu_worker.models.llama_tensors import tensor_shapes
from service_kit.model_manifest import ModelManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Sizes of a Llama; tied head."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    context_length: int


ONE_BILLION = ModelSize(
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    vocab_size=128256,
    context_length=2048,
)
TINY = ModelSize(
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=4,
    num_kv_heads=1,
    vocab_size=300,
    context_length=64,
)


def write_random_model(directory: Path, size: ModelSize, *, dtype: torch.dtype, device: torch.device) -> None:
    """`device` makes the random numbers."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": size.hidden_size,
        "intermediate_size": size.intermediate_size,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "vocab_size": size.vocab_size,
        "max_position_embeddings": size.context_length,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
    }
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator(device=device).manual_seed(0)
    weights = {}
    for name, shape in tensor_shapes(read_model_config(directory)).items():
        values = torch.randn(shape, generator=generator, device=device) * 0.02
        weights[name] = (values + 1 if "norm" in name else values).to(dtype).cpu()
    save_file(weights, directory / "model.safetensors")
    write_byte_tokenizer(directory)
    ModelManifest(
        model="random-llama",
        revision="random",
        precision="fp32" if dtype == torch.float32 else "bf16",
        context_length=size.context_length,
        vocab_size=size.vocab_size,
        bos_token_id=BOS_TOKEN_ID,
        eos_token_ids=(EOS_TOKEN_ID,),
    ).write(directory)
