"""Decoder layers as one call for each layer and step.

Between the operations of a layer the interpreter needs about as long as one row's products do. The operations are those that
the layer is made of otherwise, so that the bits are the same.
"""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass

import torch

from gpu_worker.kernels.product import PackedWeight, ProductKernels


class AddressedStep(ABC):
    """The attention of a step whose kernel can be called from the library itself.

    A class to inherit from, because each step asks whether its attention is one, and of a Protocol that takes long.
    """

    __slots__ = ()

    @abstractmethod
    def addresses(self, layer: int) -> tuple[int, int]:
        """Of what the kernel is told about the step, and of the layer's KV memory; asked for right before it is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer: weights of one kind, norms, and the norms of single heads, if there are any, in fp32."""

    query_key_value: PackedWeight
    attention_output: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    is_rotary: bool

    @property
    def weights(self) -> tuple[PackedWeight, ...]:
        return (self.query_key_value, self.attention_output, self.gate_up, self.down)


class _Layer(ctypes.Structure):
    """SluiceLayer of layer.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("query_key_value", "attention_output", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "is_rotary")),
        ("eps", c_float),
    )


class _Rows(ctypes.Structure):
    """SluiceRows of layer.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("hidden", "delta", "turns", "fused", "attended", "gate_up", "workspace")),
        *((name, c_int64) for name in ("num_rows", "threads")),
    )


class WholeLayers:
    """All layers of a model, in order, with weights of the kind of `kernels`. `heads`: query heads, KV heads, size of a head."""

    def __init__(
        self, kernels: ProductKernels, layers: Sequence[LayerWeights], *, heads: tuple[int, int, int], eps: float
    ) -> None:
        self._kernels = kernels
        self._kept = tuple(layers)
        self._layers = [_describe(layer, heads, eps) for layer in layers]
        self._heads = heads

    def run(self, hidden: torch.Tensor, turns: torch.Tensor, step: AddressedStep) -> torch.Tensor:
        """What is still to be added to `hidden` [T, width] behind the last layer; the rest is added in place."""
        num_heads, num_kv_heads, head_dim = self._heads
        num_rows, threads = hidden.shape[0], torch.get_num_threads()
        assert hidden.dtype == turns.dtype == torch.float32
        assert hidden.is_contiguous()
        assert turns.is_contiguous()
        assert turns.shape == (num_rows, 2, head_dim // 2)
        first = self._kept[0]
        assert hidden.shape[1] == first.query_key_value.num_inputs
        delta = torch.empty_like(hidden)
        fused = torch.empty(num_rows, (num_heads + 2 * num_kv_heads) * head_dim)
        attended = torch.empty(num_rows, num_heads * head_dim)
        gate_up = torch.empty(num_rows, first.gate_up.num_outputs)
        size = self._kernels.workspace_size
        needed = max(size(weight.address, num_rows, threads) for weight in first.weights)
        workspace = torch.empty(needed, dtype=torch.uint8)
        rows = _Rows(
            hidden=hidden.data_ptr(),
            delta=delta.data_ptr(),
            turns=turns.data_ptr(),
            fused=fused.data_ptr(),
            attended=attended.data_ptr(),
            gate_up=gate_up.data_ptr(),
            workspace=workspace.data_ptr(),
            num_rows=num_rows,
            threads=threads,
        )
        rows_address = ctypes.addressof(rows)
        for index, layer in enumerate(self._layers):
            told, memory = step.addresses(index)
            self._kernels.layer(ctypes.addressof(layer), told, memory, rows_address, index == 0)
        return delta


def _describe(layer: LayerWeights, heads: tuple[int, int, int], eps: float) -> _Layer:
    num_heads, num_kv_heads, head_dim = heads
    width, attended = layer.query_key_value.num_inputs, num_heads * head_dim
    shapes = [(weight.num_outputs, weight.num_inputs) for weight in layer.weights]
    inner = layer.down.num_inputs
    assert shapes == [
        (attended + 2 * num_kv_heads * head_dim, width),
        (width, attended),
        (2 * inner, width),
        (width, inner),
    ]
    for norm, size in (
        (layer.input_norm, width),
        (layer.mlp_norm, width),
        (layer.query_norm, head_dim),
        (layer.key_norm, head_dim),
    ):
        assert norm is None or (norm.dtype == torch.float32 and norm.shape == (size,) and norm.is_contiguous())
    return _Layer(
        query_key_value=layer.query_key_value.address,
        attention_output=layer.attention_output.address,
        gate_up=layer.gate_up.address,
        down=layer.down.address,
        input_norm=layer.input_norm.data_ptr(),
        mlp_norm=layer.mlp_norm.data_ptr(),
        query_norm=None if layer.query_norm is None else layer.query_norm.data_ptr(),
        key_norm=None if layer.key_norm is None else layer.key_norm.data_ptr(),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        is_rotary=layer.is_rotary,
        eps=eps,
    )
