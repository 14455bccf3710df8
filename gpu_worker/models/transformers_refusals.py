"""What the transformers path does not serve, told by a config or a model class before any weight is read.

What this does not recognise is caught by the forward that is checked against eager at every load; but here the reason has a
name, and it costs no time.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from service_kit.model_manifest import ModelFilesError

_BATCH_DEPENDENT_ROPES = {
    "longrope": "its rotation depends on the longest sequence of the batch",
    "su": "its rotation (longrope) depends on the longest sequence of the batch",
    "dynamic": "its rotation (dynamic NTK) depends on the longest sequence of the batch",
}
_PAGED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_STATES = frozenset({"conv", "hybrid", "linear_attention", "mamba", "mamba2", "moe_mamba", "recurrent"})


class UnsupportedArchitectureError(ModelFilesError):
    """No path of the engine serves this model; `model_type` is that of its config, and the reason is told."""

    def __init__(self, model_type: str, reason: str) -> None:
        super().__init__(f"model_type {model_type!r} cannot be served: {reason}")
        self.model_type = model_type
        self.reason = reason


def refuse_config(config: Any) -> None:
    """Of a config of transformers. Raises UnsupportedArchitectureError."""
    model_type, text = config.model_type, config.get_text_config()
    if config.is_encoder_decoder:
        raise UnsupportedArchitectureError(model_type, "it has an encoder, only decoders are served")
    for rope_type in _rope_types(text.to_dict()):
        if rope_type in _BATCH_DEPENDENT_ROPES:
            raise UnsupportedArchitectureError(
                model_type, f"config.json: rope type {rope_type!r}: {_BATCH_DEPENDENT_ROPES[rope_type]}"
            )
    for layer_type in getattr(text, "layer_types", None) or ():
        if layer_type not in _PAGED_LAYER_TYPES:
            meaning = "keeps a recurrent state" if layer_type in _STATES else "is not paged attention"
            raise UnsupportedArchitectureError(
                model_type, f"config.json: layer_types: a layer of type {layer_type!r} {meaning}"
            )


def _rope_types(fields: Mapping[str, Any]) -> Iterator[str]:
    """Of a config's rotations; some have one for each type of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.get(name)
        if isinstance(rope, Mapping):
            for each in (rope, *(inner for inner in rope.values() if isinstance(inner, Mapping))):
                yield from (str(each[key]) for key in ("rope_type", "type") if each.get(key))


def refuse_class(module: Any) -> None:
    """Of a model without weights. Raises UnsupportedArchitectureError.

    The two names with an underscore are private to transformers. Where a release lacks one, nothing is refused here.
    """
    model_type = module.config.model_type
    if getattr(module, "_is_stateful", False):
        raise UnsupportedArchitectureError(model_type, "its layers keep a recurrent state, which has no pages")
    if any(name.rpartition(".")[2] == "sinks" for name, _ in module.named_parameters()):
        raise UnsupportedArchitectureError(model_type, "it has attention sinks, which are not computed")
    can_set = getattr(type(module), "_can_set_attn_implementation", None)
    if can_set is not None and not can_set():
        raise UnsupportedArchitectureError(
            model_type,
            "its code in transformers does not use the attention interface, so that KV memory cannot be paged",
        )


def refuse_quantization(config: Any) -> None:
    """To be asked last: other reasons hold for the unquantized weights too. Raises UnsupportedArchitectureError."""
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedArchitectureError(
            config.model_type, "config.json: quantization_config: such weights are not read"
        )


def refuse_windows(config: Any, windows: tuple[int | None, ...], context_length: int) -> None:
    """Windows that the config has and the layers do not ask for would be computed by eager's masks only.

    Raises UnsupportedArchitectureError.
    """
    text = config.get_text_config()
    window, types = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    if not isinstance(window, int) or window >= context_length:
        return
    if types is not None and len(types) == len(windows):
        is_missing = any(
            found is None and layer_type == "sliding_attention"
            for found, layer_type in zip(windows, types, strict=True)
        )
    else:
        is_missing = types is None and not any(windows)
    if is_missing:
        raise UnsupportedArchitectureError(
            config.model_type, f"config.json: sliding_window: {window}, but a layer does not tell its attention so"
        )
