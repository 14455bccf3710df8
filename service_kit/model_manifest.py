"""The manifest of a model directory: what gateway and worker must agree on. Pure but for reading files.

A model directory holds `sluice-model.json` beside config.json, tokenizer.json, tokenizer_config.json (chat template),
generation_config.json and the safetensors files. The revision is a content hash over weights, tokenizer and template.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

MANIFEST_NAME = "sluice-model.json"
_HASHED_SUFFIXES = (".safetensors", ".json", ".jinja")


class ModelFilesError(Exception):
    """A model directory that cannot be used; the text names the file and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelManifest:
    """Name and identity of one model on disk.

    `eos_token_ids` is generation_config ∪ config ∪ tokenizer. `precision` is that of the weights ("fp32", "sim").
    """

    model: str
    revision: str
    precision: str
    context_length: int
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def write(self, directory: Path) -> None:
        (directory / MANIFEST_NAME).write_text(json.dumps(asdict(self), indent=2) + "\n")


def read_manifest(directory: Path) -> ModelManifest:
    """The manifest of `directory`. Raises ModelFilesError."""
    path = directory / MANIFEST_NAME
    try:
        fields = json.loads(path.read_text())
        return ModelManifest(**{**fields, "eos_token_ids": tuple(fields["eos_token_ids"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelFilesError(f"{path}: not a model manifest: {error}") from error


def list_manifests(models_directory: Path) -> dict[str, Path]:
    """Model directories by model name. Raises ModelFilesError for a broken manifest or a name that stands twice."""
    found: dict[str, Path] = {}
    for path in sorted(models_directory.glob(f"*/{MANIFEST_NAME}")):
        manifest = read_manifest(path.parent)
        if manifest.model in found:
            raise ModelFilesError(f"model {manifest.model} stands in both {found[manifest.model]} and {path.parent}")
        found[manifest.model] = path.parent
    return found


def content_revision(directory: Path) -> str:
    """Hash (16 hex digits) of the names and contents of all files that decide the output."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(directory.iterdir()):
        if path.suffix in _HASHED_SUFFIXES and path.name != MANIFEST_NAME:
            with path.open("rb") as file:
                digest.update(path.name.encode() + b"\0" + hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()
