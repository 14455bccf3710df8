"""The manifest of a model: what gateway and worker must agree on. Pure but for reading files.

A model is a directory or a GGUF file. A directory holds `sluice-model.json` beside config.json, tokenizer.json, tokenizer_config.json (chat template),
generation_config.json and the safetensors files. The revision is a content hash over weights, tokenizer and template. A GGUF
file has all of this inside; its manifest follows from it.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from service_kit.gguf.files import is_gguf, list_gguf_files, model_name, part_paths
from service_kit.gguf.identity import read_identity
from service_kit.model_files_error import ModelFilesError

__all__ = ["MANIFEST_NAME", "ModelFilesError", "ModelManifest", "content_revision", "find_model", "list_manifests",
           "list_models", "read_manifest"]  # fmt: skip

MANIFEST_NAME = "sluice-model.json"
_GGUF_PRECISION = "fp32"
_HASHED_SUFFIXES = (".safetensors", ".json", ".jinja")


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


def read_manifest(model: Path) -> ModelManifest:
    """The manifest of a directory or GGUF file. Raises ModelFilesError."""
    if is_gguf(model):
        return _manifest_of_gguf(model, _states(model))
    path = model / MANIFEST_NAME
    try:
        fields = json.loads(path.read_text())
        return ModelManifest(**{**fields, "eos_token_ids": tuple(fields["eos_token_ids"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelFilesError(f"{path}: not a model manifest: {error}") from error


def list_models(models_directory: Path) -> list[Path]:
    """Directories with a manifest and GGUF files, whether they can be read or not."""
    directories = [path.parent for path in sorted(models_directory.glob(f"*/{MANIFEST_NAME}"))]
    return directories + (list_gguf_files(models_directory) if models_directory.is_dir() else [])


def list_manifests(models_directory: Path) -> dict[str, Path]:
    """Models by name. Raises ModelFilesError for a broken manifest or a name that stands twice."""
    found: dict[str, Path] = {}
    for path in list_models(models_directory):
        name = model_name(path) if is_gguf(path) else read_manifest(path).model
        if name in found:
            raise ModelFilesError(f"model {name} stands in both {found[name]} and {path}")
        found[name] = path
    return found


def find_model(models_directory: Path, name: str) -> Path | None:
    """The directory or file called `name`."""
    directory = models_directory / name
    if (directory / MANIFEST_NAME).exists():
        return directory
    files = list_gguf_files(models_directory) if models_directory.is_dir() else []
    return next((path for path in files if model_name(path) == name), None)


def content_revision(directory: Path) -> str:
    """Hash (16 hex digits) of the names and contents of all files that decide the output."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(directory.iterdir()):
        if path.suffix in _HASHED_SUFFIXES and path.name != MANIFEST_NAME:
            with path.open("rb") as file:
                digest.update(path.name.encode() + b"\0" + hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()


FileState = tuple[int, int, int]


def _states(model: Path) -> tuple[FileState, ...]:
    """Inode, size and time of a GGUF model's files: as long as they are the same, so is the content."""
    try:
        states = [path.stat() for path in part_paths(model)]
    except OSError as error:
        raise ModelFilesError(f"{error.filename}: not readable: {error.strerror}") from error
    return tuple((state.st_ino, state.st_size, state.st_mtime_ns) for state in states)


@lru_cache(maxsize=64)
def _manifest_of_gguf(model: Path, _: tuple[FileState, ...]) -> ModelManifest:
    """Read once: hashing a large file takes seconds. The weights are computed as numbers of full precision."""
    identity = read_identity(model)
    return ModelManifest(
        model=identity.name,
        revision=identity.revision,
        precision=_GGUF_PRECISION,
        context_length=identity.context_length,
        vocab_size=identity.vocab_size,
        bos_token_id=identity.bos_token_id,
        eos_token_ids=identity.eos_token_ids,
    )
