"""Our attention inside the model code of transformers.

That code asks a table of functions for the one its config names, and calls it in every layer with query, key and value and
with what scores differ in: scaling, sliding_window, softcap. Ours hands them to whoever runs the forward: first to an
observer, which learns the geometry of each layer and refuses arguments that paged attention does not compute; then, in every
step, to the step's paged attention.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface

from gpu_worker.attention.layered import LayerGeometry
from gpu_worker.attention.port import StepAttention
from gpu_worker.models.transformers_refusals import UnsupportedArchitectureError

NAME = "sluice_paged"
"""In `set_attn_implementation`. No mask is registered under it, so that transformers makes none."""

Take = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, Mapping[str, Any]], torch.Tensor]
"""(attention module, query, key, value, arguments): heads [1, heads, T, size]; gives [1, T, heads, value size]."""

_TAKE: ContextVar[Take] = ContextVar("take")
_SCORING = frozenset({"scaling", "sliding_window", "softcap"})
# Of no effect on what is computed here: positions are in query and key already, and there is no cache of theirs.
_WITHOUT_EFFECT = frozenset(
    {
        "cache", "cache_position", "max_length_k", "max_length_q", "output_attentions", "output_hidden_states",
        "output_router_logits", "past_key_values", "position_embeddings", "position_ids", "return_dict", "use_cache",
    }
)  # fmt: skip
_REASONS = {"s_aux": "attention sinks", "sinks": "attention sinks", "position_bias": "a bias by position"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedLayer:
    """One layer that attends. `value_size` is that of a value head, at most that of a key head."""

    layer_idx: int
    geometry: LayerGeometry
    value_size: int


def register() -> None:
    """Makes NAME known to transformers. May be repeated."""
    AttentionInterface.register(NAME, _attention)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _attention_mask: object = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls. Raises LookupError outside of `taking`."""
    return _TAKE.get()(module, query, key, value, arguments), None


@contextmanager
def taking(take: Take) -> Iterator[None]:
    """Every call of ours goes to `take` meanwhile."""
    token = _TAKE.set(take)
    try:
        yield
    finally:
        _TAKE.reset(token)


class Observer:
    """Learns what each layer asks for; its attention gives zeros."""

    def __init__(self, model_type: str) -> None:
        self._model_type = model_type
        self.layers: list[ObservedLayer] = []

    def take(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: Mapping[str, Any]
    ) -> torch.Tensor:
        """Raises UnsupportedArchitectureError."""
        self._refuse_what_is_not_computed(module, arguments)
        self.layers.append(self._observe(module, query, key, value, arguments))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def _refuse_what_is_not_computed(self, module: Any, arguments: Mapping[str, Any]) -> None:
        for name, argument in arguments.items():
            if name in _SCORING or name in _WITHOUT_EFFECT or argument is None:
                continue
            if (name == "dropout" and argument == 0) or (name == "is_causal" and argument):
                continue
            if name == "is_causal":
                raise self._refuse("a layer attends to what comes later (is_causal is false)")
            meaning = f", that is {_REASONS[name]}" if name in _REASONS else ""
            raise self._refuse(f"a layer passes {name!r} to its attention{meaning}, which is not computed")
        if getattr(module, "is_causal", True) is False:
            raise self._refuse("a layer attends to what comes later (is_causal is false)")

    def _observe(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: Mapping[str, Any]
    ) -> ObservedLayer:
        layer_idx = getattr(module, "layer_idx", None)
        if not isinstance(layer_idx, int) or any(layer.layer_idx == layer_idx for layer in self.layers):
            raise self._refuse(f"a layer that attends has the number {layer_idx!r}, which is none or not its own")
        _, num_heads, num_rows, head_dim = query.shape
        num_kv_heads, value_size = key.shape[1], value.shape[3]
        is_sound = (
            key.shape == (1, num_kv_heads, num_rows, head_dim)
            and value.shape[:3] == key.shape[:3]
            and num_heads % num_kv_heads == 0
            and value_size <= head_dim
        )
        if not is_sound:
            shapes = f"{list(query.shape)}, {list(key.shape)}, {list(value.shape)}"
            raise self._refuse(f"layer {layer_idx} attends with query, key and value of shapes {shapes}")
        scaling = arguments.get("scaling")
        geometry = LayerGeometry(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window=arguments.get("sliding_window"),
            scale=None if scaling is None else float(scaling),
            softcap=arguments.get("softcap"),
        )
        return ObservedLayer(layer_idx=layer_idx, geometry=geometry, value_size=value_size)

    def _refuse(self, reason: str) -> UnsupportedArchitectureError:
        return UnsupportedArchitectureError(self._model_type, reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedTake:
    """A step's paged attention under the calls of transformers. `places`: of each layer_idx, the layer of the backend."""

    attend: StepAttention
    places: Mapping[int, int]
    dtype: torch.dtype

    def take(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _arguments: Mapping[str, Any]
    ) -> torch.Tensor:
        """Values that are smaller than keys are stored with zeros behind them."""
        value_size, head_dim = value.shape[3], key.shape[3]
        if value_size < head_dim:
            value = pad(value, (0, head_dim - value_size))
        rows = (heads[0].transpose(0, 1).to(self.dtype) for heads in (query, key, value))
        output = self.attend(self.places[module.layer_idx], *rows)
        return output[None, :, :, :value_size].to(query.dtype)
