"""GGUF files made of model directories, the way llama.cpp's converter makes them, with weights of any type."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file, save_file

from gpu_worker.artifacts.checkpoints import open_checkpoint
from gpu_worker.models.config import read_model_config
from gpu_worker.models.llama_tensors import ignored_suffixes, tensor_shapes
from service_kit.model_manifest import read_manifest
from service_kit.token_bytes import read_token_bytes
from tests.support.tiny_models import read_config

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "smollm3": "smollm3"}
_TURNS_PAIRS = ("llama", "smollm3")
_PLAIN = {Kind.F32: np.float32, Kind.F16: np.float16}
# Where the fp16 scales of a block lie, and how large they are: so that weights made of random bytes are about 0.05.
_SCALES = {Kind.Q4_K: ((0, 1.5e-4), (2, 2e-3)), Kind.Q5_K: ((0, 7e-5), (2, 2e-3)), Kind.Q6_K: ((208, 3e-5),)}

KindOf = Callable[[str], Kind]


def everything(kind: Kind) -> KindOf:
    """That type for every matrix; norms and biases are always F32."""
    return lambda _: kind


all_f32 = everything(Kind.F32)


def q4_k_m(name: str) -> Kind:
    """As llama.cpp's Q4_K_M: most of it Q4_K, the head and half of the values and of what follows the gate Q6_K."""
    is_larger = name == "output.weight" or (
        name.startswith("blk.0.") and name.endswith(("attn_v.weight", "ffn_down.weight"))
    )
    return Kind.Q6_K if is_larger else Kind.Q4_K


def write_gguf(
    path: Path,
    directory: Path,
    *,
    kind_of: KindOf = all_f32,
    changes: Mapping[str, Any] | None = None,
    pre: str = "gpt-2",
    split_max_tensors: int = 0,
) -> None:
    """The model of `directory` in `path`. The weights in the directory become what those in the file stand for.

    A tokenizer without merges gets one, and so another token: the model needs room for it.

    `changes` are metadata put in place of what would stand there; None leaves a key out.
    """
    config = read_config(directory)
    writer = _Writer(path, _ARCHITECTURES[str(config["model_type"])], changes or {}, split_max_tensors)
    _add_config(writer, config)
    add_tokenizer(writer, directory, pre=pre)
    state = load_file(directory / "model.safetensors")
    names = gguf.get_tensor_name_map(writer.model_arch, int(str(config["num_hidden_layers"])))
    rng = np.random.default_rng(5)
    for name, values in state.items():
        key = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert key is not None, name
        num_heads = _num_heads(writer.architecture, key, config)
        kind = kind_of(key) if values.ndim == 2 else Kind.F32
        stored = _stored(_pairs_from_halves(values, num_heads) if num_heads else values, kind, rng)
        writer.inner.add_tensor(key, stored, raw_dtype=None if kind in _PLAIN else kind)
        read = stored.astype(np.float32) if kind in _PLAIN else dequantize(stored, kind)
        state[name] = np.ascontiguousarray(_halves_from_pairs(read, num_heads) if num_heads else read)
    writer.close()
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})


class _Writer:
    """A GGUFWriter whose metadata can be changed by the name of the key."""

    def __init__(self, path: Path, architecture: str, changes: Mapping[str, Any], split_max_tensors: int) -> None:
        self.inner = gguf.GGUFWriter(path, architecture, split_max_tensors=split_max_tensors)
        self.architecture = architecture
        self.model_arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
        self._changes = changes
        self.inner.data_alignment = changes.get("general.alignment", self.inner.data_alignment)

    def add(self, key: str, value: Any) -> None:
        """A key, with the architecture's name before it if it begins with a dot."""
        self._put(self.architecture + key if key.startswith(".") else key, value)

    def close(self) -> None:
        present = self.inner.kv_data[0]
        for key, value in self._changes.items():
            present.pop(key, None)
            if value is not None:
                self._put(key, value)
        self.inner.write_header_to_file()
        self.inner.write_kv_data_to_file()
        self.inner.write_tensors_to_file()
        self.inner.close()

    def _put(self, key: str, value: Any) -> None:
        match value:
            case bool():
                self.inner.add_bool(key, value)
            case int():
                self.inner.add_uint32(key, value)
            case float():
                self.inner.add_float32(key, value)
            case str():
                self.inner.add_string(key, value)
            case _:
                self.inner.add_array(key, value)


def _add_config(writer: _Writer, config: Mapping[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config["rope_parameters"]
    fields = {
        ".context_length": config["max_position_embeddings"],
        ".embedding_length": config["hidden_size"],
        ".block_count": config["num_hidden_layers"],
        ".feed_forward_length": config["intermediate_size"],
        ".attention.head_count": config["num_attention_heads"],
        ".attention.head_count_kv": config["num_key_value_heads"],
        ".attention.key_length": head_dim,
        ".attention.value_length": head_dim,
        ".attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        ".rope.dimension_count": head_dim,
        ".rope.freq_base": float(rope["rope_theta"]),
    }
    if config["model_type"] == "mistral" and config["sliding_window"]:
        fields[".attention.sliding_window"] = config["sliding_window"]
    if rope["rope_type"] in ("linear", "yarn"):
        fields[".rope.scaling.type"] = rope["rope_type"]
        fields[".rope.scaling.factor"] = float(rope["factor"])
    if rope["rope_type"] == "yarn":
        fields[".rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    for key, value in fields.items():
        writer.add(key, value)
    if rope["rope_type"] == "llama3":
        writer.inner.add_tensor("rope_freqs.weight", np.array(_llama3_divisors(rope, head_dim), np.float32))


def add_tokenizer(writer: Any, directory: Path, *, pre: str) -> None:
    """Tokens, kinds, merges, special tokens, template and BOS rule of a directory's byte-level tokenizer."""
    document = json.loads((directory / "tokenizer.json").read_text())
    config = json.loads((directory / "tokenizer_config.json").read_text())
    added = {token["id"]: token for token in document["added_tokens"]}
    ids = document["model"]["vocab"] | {token["content"]: token["id"] for token in added.values()}
    tokens = sorted(ids, key=ids.__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in document["model"]["merges"]]
    if not merges:  # which the package cannot write
        tokens, merges = [*tokens, "ab"], ["a b"]
    writer.add("tokenizer.ggml.model", "gpt2")
    writer.add("tokenizer.ggml.pre", pre)
    writer.inner.add_token_list(tokens)
    writer.inner.add_token_types(
        [1 if index not in added else 3 if added[index]["special"] else 4 for index in range(len(tokens))]
    )
    writer.inner.add_token_merges(merges)
    for role, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        if config.get(role) is not None:
            writer.add(f"tokenizer.ggml.{key}_token_id", ids[config[role]])
    writer.add("tokenizer.ggml.add_bos_token", document["post_processor"] is not None)
    writer.add("tokenizer.chat_template", config["chat_template"])


def vocabulary_gguf(path: Path, directory: Path, *, pre: str) -> None:
    """Only the tokenizer of a directory, with what else is read beside it."""
    writer = _Writer(path, "llama", {}, 0)
    writer.add(".context_length", 64)
    add_tokenizer(writer, directory, pre=pre)
    writer.inner.add_tensor("token_embd.weight", np.zeros((1, 1), np.float32))
    writer.close()


def read_everything(path: Path) -> None:
    """All that gateway and worker read of a model but the numbers of its tensors."""
    read_manifest(path)
    read_token_bytes(path)
    config = read_model_config(path)
    open_checkpoint(path, shapes=tensor_shapes(config), ignored_suffixes=ignored_suffixes(config))


def _llama3_divisors(rope: Mapping[str, float], head_dim: int) -> list[float]:
    """`LlamaModel.generate_extra_tensors` of llama.cpp's converter."""
    original, low, high = (
        rope[name] for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    divisors = []
    for frequency in (1.0 / rope["rope_theta"] ** (index / head_dim) for index in range(0, head_dim, 2)):
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return divisors


def _stored(values: np.ndarray, kind: Kind, rng: np.random.Generator) -> np.ndarray:
    """For the types that the package cannot make of numbers: blocks of random bytes with fitting scales."""
    if kind in _PLAIN:
        return np.ascontiguousarray(values, _PLAIN[kind])
    if kind not in _SCALES:
        return quantize(np.ascontiguousarray(values), kind)
    num_values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (values.size // num_values, num_bytes), np.uint8)
    for offset, scale in _SCALES[kind]:
        blocks[:, offset : offset + 2] = (rng.random((len(blocks), 1)) * scale).astype(np.float16).view(np.uint8)
    return blocks.reshape(len(values), -1)


def _num_heads(architecture: str, key: str, config: Mapping[str, Any]) -> int | None:
    """Of the projections whose rows are stored in pairs."""
    part = key.split(".")[-2]
    if architecture not in _TURNS_PAIRS or part not in ("attn_q", "attn_k"):
        return None
    return int(config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"])


def _pairs_from_halves(values: np.ndarray, num_heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's converter."""
    return (
        values.reshape(num_heads, 2, len(values) // num_heads // 2, *values.shape[1:])
        .swapaxes(1, 2)
        .reshape(values.shape)
    )


def _halves_from_pairs(values: np.ndarray, num_heads: int) -> np.ndarray:
    return (
        values.reshape(num_heads, len(values) // num_heads // 2, 2, *values.shape[1:])
        .swapaxes(1, 2)
        .reshape(values.shape)
    )
