"""The tokenizer and chat template of a model, whether it is a directory or a GGUF file. Pure but for reading files."""

import json
from pathlib import Path
from typing import Any

from service_kit.gguf.files import is_gguf
from service_kit.gguf.header import read_header
from service_kit.gguf.tokenizer import tokenizer_config, tokenizer_document
from service_kit.model_files_error import ModelFilesError

TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"


def tokenizer_path(model: Path) -> Path:
    """The file that the tokenizer stands in."""
    return model if is_gguf(model) else model / TOKENIZER_NAME


def read_tokenizer_text(model: Path) -> str:
    """What tokenizer.json holds, or would hold. Raises OSError for a directory without one, GgufError for a bad file."""
    if is_gguf(model):
        return json.dumps(read_tokenizer_document(model))
    return tokenizer_path(model).read_text(encoding="utf-8")


def read_tokenizer_document(model: Path) -> Any:
    """The same, parsed. Raises OSError, ValueError or GgufError."""
    return tokenizer_document(read_header(model)) if is_gguf(model) else json.loads(read_tokenizer_text(model))


def read_tokenizer_config(model: Path) -> dict[str, Any]:
    """What tokenizer_config.json holds; nothing if there is none. Raises ModelFilesError."""
    if is_gguf(model):
        return tokenizer_config(read_header(model))
    path = model / TOKENIZER_CONFIG_NAME
    try:
        fields = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{path}: {error}") from error
    if not isinstance(fields, dict):
        raise ModelFilesError(f"{path}: not an object")
    return fields


def read_template_file(model: Path) -> str | None:
    """chat_template.jinja, which outranks tokenizer_config.json; a GGUF file has none."""
    path = model / "chat_template.jinja"
    return path.read_text() if not is_gguf(model) and path.exists() else None
