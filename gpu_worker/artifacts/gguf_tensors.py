"""The tensors of a GGUF file of the Llama family, by the names of config.json's model: found, put in order, dequantized."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from gpu_worker.artifacts.gguf_config import ROPE_DIVISORS, gguf_family
from gpu_worker.artifacts.tensor_names import require_same_names
from service_kit.gguf.errors import GgufError, UnsupportedGgufError
from service_kit.gguf.header import GgufHeader, GgufTensor
from service_kit.gguf.tensor_types import SUPPORTED

Float32Array = NDArray[np.float32]
_PLAIN = {"F32": "<f4", "F16": "<f2"}
_PIECE_VALUES = 1 << 16

_OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_PREFIX = "model.layers."
_LAYER_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_HEADS_KEYS = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
_DERIVED = (ROPE_DIVISORS, ".attn_rot_embd.weight", ".rope_freqs.weight")


def gguf_name(name: str) -> str:
    """The name in GGUF of a tensor of the model."""
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    layer, _, rest = name.removeprefix(_LAYER_PREFIX).partition(".")
    part, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_LAYER_PARTS[part]}.{kind}"


class GgufTensors:
    """Reads one tensor at a time; nothing is held. Every tensor is fp32, whatever it is stored as."""

    def __init__(self, header: GgufHeader, *, num_threads: int = 1) -> None:
        """`num_threads` dequantize. Raises GgufError for another architecture."""
        self._header = header
        self._num_threads = num_threads
        self._turns_pairs = gguf_family(header).turns_pairs

    def require(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises GgufError or WeightsError, which name the tensor, unless these and no others are in the file."""
        found = {name for name in self._header.tensors if not name.endswith(_DERIVED)}
        require_same_names(self._header.path, {gguf_name(name) for name in shapes}, found)
        for name, shape in shapes.items():
            self._require(name, shape)

    def _require(self, name: str, shape: tuple[int, ...]) -> None:
        key = gguf_name(name)
        tensor = self._header.tensors[key]
        if tensor.num_bytes is None:
            supported = ", ".join(SUPPORTED)
            raise UnsupportedGgufError(
                tensor.path, key, f"is of type {tensor.type_name}; quantize the model to one of {supported}"
            )
        if tensor.shape != shape:
            raise GgufError(tensor.path, key, f"has shape {tensor.shape}, the metadata asks for {shape}")

    def read(self, name: str) -> Float32Array:
        """A required tensor, as the model has it."""
        key = gguf_name(name)
        tensor = self._header.tensors[key]
        rows = _stored_rows(tensor)
        part = key.split(".")[-2]
        if self._turns_pairs and part in _HEADS_KEYS:
            rows = halves_from_pairs(rows, self._num_heads(_HEADS_KEYS[part]))
        return _dequantize(rows, tensor.type_name, self._num_threads).reshape(tensor.shape)

    def _num_heads(self, name: str) -> int:
        architecture = self._header.architecture
        found = self._header.whole_or_none(f"{architecture}.{name}")
        return found or self._header.whole(f"{architecture}.attention.head_count")


def halves_from_pairs(rows: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Rows of a projection [heads * head_dim, …], per head: from the order of pairs to that of halves (0, 2, … 1, 3, …).

    GGUF stores them for the rotation of neighbouring pairs; the model rotates halves. Rows are reordered as they are
    stored: a block of a quantized type never crosses rows.
    """
    pairs = rows.reshape(num_heads, len(rows) // num_heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(len(rows), -1)


def _dequantize(rows: NDArray[Any], type_name: str, num_threads: int) -> Float32Array:
    """Numbers [blocks, numbers per block] as fp32. In pieces that stay in a core's cache, by several threads: numpy lets
    other threads run meanwhile."""
    if rows.dtype != np.uint8:
        return np.array(rows, dtype=np.float32)
    size, kind = SUPPORTED[type_name], GGMLQuantizationType[type_name]
    blocks = np.ascontiguousarray(rows).reshape(-1, size.num_bytes)
    values = np.empty((len(blocks), size.num_values), np.float32)
    step = max(1, _PIECE_VALUES // size.num_values)

    def work(start: int) -> None:
        piece = blocks[start : start + step]
        values[start : start + len(piece)] = dequantize(piece.reshape(1, -1), kind).reshape(len(piece), -1)

    starts = range(0, len(blocks), step)
    if num_threads == 1 or len(starts) == 1:
        for start in starts:
            work(start)
    else:
        with ThreadPoolExecutor(min(num_threads, len(starts))) as executor:
            list(executor.map(work, starts))
    return values


def _stored_rows(tensor: GgufTensor) -> NDArray[Any]:
    """[rows, what a row is stored as], mapped; a vector has rows of one number."""
    assert tensor.num_bytes is not None, "checked"
    stored: NDArray[Any] = np.memmap(tensor.path, np.uint8, "r", tensor.offset, (tensor.num_bytes,))
    if tensor.type_name in _PLAIN:
        stored = stored.view(_PLAIN[tensor.type_name])
    if len(tensor.shape) > 1:
        return stored.reshape(tensor.shape[0], -1)
    return stored.reshape(-1, 1) if tensor.type_name in _PLAIN else stored.reshape(1, -1)
