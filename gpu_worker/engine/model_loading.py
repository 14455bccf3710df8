"""Chooses whose code computes a model: ours for the Llama family, that of transformers for other decoders."""

from dataclasses import dataclass, replace
from pathlib import Path

import structlog
import torch

from gpu_worker.attention.layered import LayerGeometry
from gpu_worker.engine.settings import INT8_PRECISION
from gpu_worker.models.config import ModelConfig, UnsupportedModelError, read_model_config
from gpu_worker.models.llama import LlamaModel
from gpu_worker.models.port import PackedModel
from service_kit.model_manifest import ModelFilesError, ModelManifest

_log = structlog.get_logger(__name__)

NATIVE, TRANSFORMERS = "native", "transformers"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model with its weights. `code`: whose code computes it, NATIVE or TRANSFORMERS.

    That of transformers may look at values between kernels (experts do), so that it cannot be recorded and replayed.
    """

    model: PackedModel
    code: str
    layers: tuple[LayerGeometry, ...]
    context_length: int

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """KV memory of one token over all layers."""
        return sum(layer.kv_bytes_per_token(bytes_per_value) for layer in self.layers)


def load_model(directory: Path, manifest: ModelManifest, *, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """By our own code if that understands every field of config.json, else by that of transformers.

    Raises ModelFilesError; if neither can, with the reason of transformers, raised from ours.
    """
    try:
        config = read_model_config(directory)
    except UnsupportedModelError as refusal:
        _log.info("model_code", code=TRANSFORMERS, reason=str(refusal))
        return _load_with_transformers(directory, manifest, device=device, dtype=dtype)
    _log.info("model_code", code=NATIVE, reason="the Llama family")
    return _load_native(directory, manifest, config, device=device, dtype=dtype)


def _load_native(
    directory: Path, manifest: ModelManifest, config: ModelConfig, *, device: torch.device, dtype: torch.dtype
) -> LoadedModel:
    _check_vocabulary(directory, manifest, config.vocab_size)
    is_int8 = manifest.precision == INT8_PRECISION
    if is_int8 and config.is_tied:
        raise ModelFilesError(f"{directory}: config.json ties the head to the embedding, which is not {INT8_PRECISION}")
    return LoadedModel(
        model=LlamaModel.load(directory, replace(config, is_int8=is_int8), device=device, dtype=dtype),
        code=NATIVE,
        layers=tuple(
            LayerGeometry(
                num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, window=window
            )
            for window in config.windows
        ),
        context_length=min(manifest.context_length, config.max_position_embeddings),
    )


def _load_with_transformers(
    directory: Path, manifest: ModelManifest, *, device: torch.device, dtype: torch.dtype
) -> LoadedModel:
    # Only here is transformers loaded: importing it takes seconds.
    from gpu_worker.models.transformers_model import TransformersModel  # noqa: PLC0415

    model = TransformersModel.load(
        directory,
        device=device,
        dtype=dtype,
        context_length=manifest.context_length,
        is_int8=manifest.precision == INT8_PRECISION,
    )
    _check_vocabulary(directory, manifest, model.vocab_size)
    limit = model.max_position_embeddings
    return LoadedModel(
        model=model,
        code=TRANSFORMERS,
        layers=model.layers,
        context_length=manifest.context_length if limit is None else min(manifest.context_length, limit),
    )


def _check_vocabulary(directory: Path, manifest: ModelManifest, vocab_size: int) -> None:
    if manifest.vocab_size != vocab_size:
        raise ModelFilesError(
            f"{directory}: the manifest's vocab_size {manifest.vocab_size} is not config.json's {vocab_size}"
        )
