"""Writes what a GGUF file says about its model as the files that a model directory has beside its weights."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gpu_worker.artifacts.gguf_config import config_fields
from service_kit.gguf.errors import GgufError
from service_kit.gguf.header import GgufHeader
from service_kit.gguf.tokenizer import tokenizer_config, tokenizer_document


def write_description(header: GgufHeader, directory: Path, *, eos_token_ids: tuple[int, ...]) -> dict[str, Any]:
    """config.json, whose content is returned, tokenizer.json, tokenizer_config.json and generation_config.json.

    Raises GgufError.
    """
    config = config_fields(header)
    try:
        tokenizer = Tokenizer.from_str(json.dumps(tokenizer_document(header)))
    except GgufError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise header.refuse("tokenizer.ggml.tokens", f"no tokenizer that can be read: {error}") from error
    tokenizer.save(str(directory / "tokenizer.json"))
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": list(eos_token_ids)}
    for name, fields in (
        ("config.json", config),
        ("tokenizer_config.json", tokenizer_config(header)),
        ("generation_config.json", generation),
    ):
        (directory / name).write_text(json.dumps(fields, indent=2) + "\n")
    return config
