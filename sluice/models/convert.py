"""A GGUF file becomes a model directory with fp32 weights, which load faster and can be read by other programs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from gpu_worker.artifacts.gguf_description import write_description
from gpu_worker.artifacts.gguf_tensors import GgufTensors
from gpu_worker.models.config import parse_model_config
from gpu_worker.models.llama_tensors import tensor_shapes
from service_kit.gguf.header import read_header
from service_kit.gguf.vocabulary import read_vocabulary
from service_kit.model_manifest import ModelFilesError, ModelManifest, content_revision
from sluice.errors import UserError


def convert_gguf(
    gguf_path: Path,
    directory: Path,
    *,
    name: str,
    end_of_text: tuple[str, ...] = (),
    on_progress: Callable[[float], None] | None = None,
) -> ModelManifest:
    """Fill `directory` (which exists and is empty) from `gguf_path`; the manifest is written last.

    `end_of_text` names tokens that end an output beside those that the file names. Raises UserError.
    """
    try:
        header = read_header(gguf_path)
        vocabulary = read_vocabulary(header)
        unknown = [token for token in end_of_text if token not in vocabulary.id_by_token]
        if unknown:
            raise UserError(f"{gguf_path.name} has no token {unknown[0]}")
        named = {vocabulary.id_by_token[token] for token in end_of_text}
        eos_token_ids = tuple(sorted({*vocabulary.end_ids(header), *named}))
        config = write_description(header, directory, eos_token_ids=eos_token_ids)
        _write_weights(
            GgufTensors(header), config, directory / "model.safetensors", on_progress=on_progress or (lambda _: None)
        )
    except ModelFilesError as error:
        raise UserError(f"cannot be converted: {error}") from error
    manifest = ModelManifest(
        model=name,
        revision=content_revision(directory),
        precision="fp32",
        context_length=config["max_position_embeddings"],
        vocab_size=config["vocab_size"],
        bos_token_id=config["bos_token_id"],
        eos_token_ids=eos_token_ids,
    )
    manifest.write(directory)
    return manifest


def _write_weights(
    tensors: GgufTensors, config: dict[str, Any], path: Path, *, on_progress: Callable[[float], None]
) -> None:
    shapes = tensor_shapes(parse_model_config(config))
    tensors.require(shapes)
    weights: dict[str, NDArray[np.float32]] = {}
    for index, name in enumerate(shapes):
        weights[name] = tensors.read(name)
        on_progress((index + 1) / len(shapes))
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)
