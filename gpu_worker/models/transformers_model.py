"""Decoders of other families than Llama, computed by their own code in transformers over our paged attention.

Nothing here is taken on trust: every load runs the model once as transformers does it, eagerly and in one piece, and then
packed, cut and paged as in service, and refuses it unless both give the same logits.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig
from transformers import AutoModelForCausalLM as _AutoModelForCausalLM
from transformers.utils import logging as _transformers_logging

from gpu_worker.artifacts.weights import WeightsError
from gpu_worker.attention.layered import LayerGeometry
from gpu_worker.attention.port import StepAttention
from gpu_worker.layers.linear.factory import LinearFactory
from gpu_worker.layers.linear.port import MakeLinear
from gpu_worker.models.transformers_attention import NAME, ObservedLayer, Observer, PagedTake, register, taking
from gpu_worker.models.transformers_check import Probe, find_fault
from gpu_worker.models.transformers_linears import pack_linears
from gpu_worker.models.transformers_refusals import (
    UnsupportedArchitectureError,
    refuse_class,
    refuse_config,
    refuse_quantization,
    refuse_windows,
)

# Their methods are not typed.
AutoModelForCausalLM: Any = _AutoModelForCausalLM
TransformersLogging: Any = _transformers_logging
_log = structlog.get_logger(__name__)
_NAMES_SHOWN = 5
# Buffers that old checkpoints carry and that follow from the config.
_DERIVED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
# What model code raises when it is not made for what it is given.
_MODEL_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NotImplementedError, RuntimeError,
    StrictDataclassError, TypeError, ValueError,
)  # fmt: skip


class TransformersModel:
    """Implements PackedModel."""

    is_batch_invariant = False

    def __init__(self, module: Any, layers: tuple[ObservedLayer, ...]) -> None:
        """`module` calls our attention, once in each of `layers`, in their order."""
        self._module = module
        self._places = {layer.layer_idx: place for place, layer in enumerate(layers)}
        self.layers: tuple[LayerGeometry, ...] = tuple(layer.geometry for layer in layers)
        text = module.config.get_text_config()
        self.vocab_size: int = text.vocab_size
        self.max_position_embeddings: int | None = getattr(text, "max_position_embeddings", None)

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        context_length: int,
        is_int8: bool = False,
        make_linear: MakeLinear | None = None,
    ) -> "TransformersModel":
        """The model of `directory`, checked. Raises UnsupportedArchitectureError, WeightsError."""
        config = check_served(directory)
        with _refusing(config.model_type):
            module = _read_weights(directory, device, dtype)
            probe = Probe.make(config.get_text_config(), context_length)
            with torch.inference_mode():
                expected = [_eager_logits(module, token_ids.to(device)) for token_ids in probe.sequences]
                layers = _observe(module, probe.sequences[0][:1].to(device))
            refuse_windows(config, tuple(layer.geometry.window for layer in layers), context_length)
            model = cls(module, layers)
            can_pack = device.type == "cpu" and dtype == torch.float32
            if can_pack and not is_int8:
                model.pack(make_linear or LinearFactory())
            with torch.inference_mode():
                fault = find_fault(model, probe, expected, dtype=dtype)
            if fault is not None:
                raise UnsupportedArchitectureError(config.model_type, fault)
            if can_pack and is_int8:
                # Only now: what rounding changes would hide what is wrong.
                model.pack(make_linear or LinearFactory(), is_int8=True)
        return model

    def pack(self, make_linear: MakeLinear, *, is_int8: bool = False) -> None:
        """Puts our products in place of the module's linears, rounded to int8 if asked."""
        linears = pack_linears(self._module, make_linear, is_int8=is_int8)
        _log.info("transformers_linears", num_packed=len(linears), is_int8=is_int8)

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self._module.parameters()).device
        return device

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: StepAttention,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The logits themselves: what stands between the last layer and them is not ours to know."""
        chosen = torch.arange(len(token_ids), device=token_ids.device) if rows is None else rows
        with taking(PagedTake(attend=attend, places=self._places, dtype=self._module.dtype).take):
            logits: torch.Tensor = self._module(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=chosen
            ).logits[0]
        # Code that does not know logits_to_keep gives all rows.
        return logits if len(logits) == len(chosen) else logits[chosen]

    def logits(self, chosen: torch.Tensor) -> torch.Tensor:
        return chosen.float()


def check_served(directory: Path) -> Any:
    """The config of transformers, unless that or the model's class is refused. Raises UnsupportedArchitectureError."""
    config = _read_config(directory)
    refuse_config(config)
    with _refusing(config.model_type), torch.device("meta"):
        refuse_class(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    refuse_quantization(config)
    return config


def _read_config(directory: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, *_MODEL_ERRORS) as error:
        model_type = str(json.loads((directory / "config.json").read_text()).get("model_type"))
        raise UnsupportedArchitectureError(model_type, f"transformers does not read its config: {error}") from error


@contextmanager
def _refusing(model_type: str) -> Iterator[None]:
    """What the model's code raises becomes a refusal with that reason."""
    try:
        yield
    except _MODEL_ERRORS as error:
        raise UnsupportedArchitectureError(model_type, f"{type(error).__name__} in its code: {error}") from error


def _read_weights(directory: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """Raises WeightsError, also for tensors that are missing, unexpected or of another shape."""
    TransformersLogging.disable_progress_bar()
    try:
        module, report = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            # Told by the report, with their names.
            ignore_mismatched_sizes=True,
        )
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{directory}: {error}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(_describe_tensor(entry) for entry in report[kind] if not str(entry).endswith(_DERIVED))
        if names:
            more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
            kind_of_tensors = kind.removesuffix("_keys")
            raise WeightsError(f"{directory}: {kind_of_tensors} tensors: {', '.join(names[:_NAMES_SHOWN])}{more}")
    return module.to(device).eval().requires_grad_(False)


def _describe_tensor(entry: str | tuple[str, Sequence[int], Sequence[int]]) -> str:
    """A name, or of a mismatched tensor name, shape in the file and shape in the model."""
    if isinstance(entry, str):
        return entry
    name, found, wanted = entry
    return f"{name} of shape {list(found)} instead of {list(wanted)}"


def _eager_logits(module: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """fp32 [T, vocab_size], as transformers computes a sequence in one piece."""
    logits: torch.Tensor = module(input_ids=token_ids[None], use_cache=False).logits[0]
    return logits.float()


def _observe(module: Any, token_ids: torch.Tensor) -> tuple[ObservedLayer, ...]:
    """Switches the module over to our attention, and learns its layers. Raises UnsupportedArchitectureError."""
    register()
    module.set_attn_implementation(NAME)
    observer = Observer(module.config.model_type)
    with taking(observer.take):
        module(input_ids=token_ids[None], use_cache=False)
    if not observer.layers:
        raise UnsupportedArchitectureError(
            module.config.model_type, "none of its layers calls the attention that transformers was told to use"
        )
    return tuple(observer.layers)
