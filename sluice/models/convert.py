"""A GGUF file becomes a model directory as every part of Sluice reads it."""

import json
from collections.abc import Callable
from pathlib import Path

from service_kit.model_manifest import ModelManifest, content_revision
from sluice.errors import UserError
from sluice.models.gguf_llama import GgufFile
from sluice.models.gguf_tokenizer import write_tokenizer


def convert_gguf(
    gguf_path: Path,
    directory: Path,
    *,
    name: str,
    end_of_text: tuple[str, ...] = (),
    on_progress: Callable[[float], None] | None = None,
) -> ModelManifest:
    """Fill `directory` (which exists and is empty) from `gguf_path`; the manifest is written last.

    `end_of_text` names tokens that end an output beside the one in the file. Raises UserError.
    """
    gguf = GgufFile(gguf_path)
    write_tokenizer(gguf, directory)
    config = gguf.write_config(directory / "config.json")
    gguf.write_weights(directory / "model.safetensors", on_progress=on_progress or (lambda _: None))
    tokens: list[str] = gguf.field("tokenizer.ggml.tokens")
    unknown = [token for token in end_of_text if token not in tokens]
    if unknown:
        raise UserError(f"{gguf_path.name} has no token {unknown[0]}")
    eos_token_ids = tuple(sorted({config["eos_token_id"], *(tokens.index(token) for token in end_of_text)}))
    generation_config = {"bos_token_id": config["bos_token_id"], "eos_token_id": list(eos_token_ids)}
    (directory / "generation_config.json").write_text(json.dumps(generation_config, indent=2) + "\n")
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
