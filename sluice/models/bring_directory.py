"""A model directory that a person names, as Hugging Face publishes them, becomes a model of the cache: by links, not copies.

The directory itself is left as it is. Beside the links lies the manifest, which is made of its config and tokenizer, and a
note of what was linked, so that gigabytes are read for the revision once and not at every start.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from service_kit.model_manifest import MANIFEST_NAME, ModelManifest, content_revision, find_model
from sluice.errors import UserError
from sluice.home import Home
from sluice.models.pull import building

_NOTE = "linked-from.txt"
_SUFFIXES = (".safetensors", ".json", ".jinja")
_OTHER_WEIGHTS = ("consolidated",)
"""Prefixes of weights that some publishers add in a second layout."""
_CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length")


def is_directory_name(text: str) -> bool:
    """Whether `--model` names a directory and not a model of the cache: it has a slash in it, and is a directory."""
    return os.sep in text and Path(text).expanduser().is_dir()


def bring_directory(home: Home, text: str) -> str:
    """The name of the model in the directory at `text`, which is in the cache then. Raises UserError.

    A directory of links that was made of another one, or before a file changed, is replaced.
    """
    source = Path(text).expanduser().absolute().resolve()
    name = source.name
    if source.parent == home.models.absolute().resolve():
        return name
    paths, note = _files(source)
    target = home.models / name
    if _read_note(target) == note:
        return name
    if find_model(home.models, name) is not None and _read_note(target) is None:
        raise UserError(
            f"a model {name} is in {home.models} already; rename {source}, or serve that one: --model {name}"
        )
    with building(home, name) as (work, publish):
        built = work / "model"
        built.mkdir()
        for path in paths:
            (built / path.name).symlink_to(path)
        describe(source, name=name, revision=content_revision(built)).write(built)
        (built / _NOTE).write_text(note)
        if _read_note(target) is not None:
            shutil.rmtree(target)  # links, and the two files that were made here
        publish(built)
    return name


def describe(source: Path, *, name: str, revision: str) -> ModelManifest:
    """The manifest of a directory that has none. Raises UserError, naming the file and the field."""
    config, generation = _read(source / "config.json"), _read_optional(source / "generation_config.json")
    tokenizer, special = _read(source / "tokenizer.json"), _read_optional(source / "tokenizer_config.json")
    text_config = config.get("text_config") or config
    eos_token_ids = {
        *_token_ids(config.get("eos_token_id")),
        *_token_ids(text_config.get("eos_token_id")),
        *_token_ids(generation.get("eos_token_id")),
        *_token_ids(_token_id_of(tokenizer, special.get("eos_token"))),
    }
    bos = text_config.get("bos_token_id")
    return ModelManifest(
        model=name,
        revision=revision,
        precision="fp32",
        context_length=_whole(source, text_config, _CONTEXT_FIELDS),
        vocab_size=_whole(source, text_config, ("vocab_size",)),
        bos_token_id=bos if isinstance(bos, int) else None,
        eos_token_ids=tuple(sorted(eos_token_ids)),
    )


def _files(source: Path) -> tuple[list[Path], str]:
    """The files that make the model, and a note of which they are and in which state. Raises UserError."""
    paths = [
        path
        for path in sorted(source.iterdir())
        if path.suffix in _SUFFIXES and path.name != MANIFEST_NAME and not path.name.startswith(_OTHER_WEIGHTS)
    ]
    names = {path.name for path in paths}
    for needed, advice in (
        ("config.json", ""),
        ("tokenizer.json", "; AutoTokenizer.from_pretrained(…).save_pretrained(…) of transformers writes it"),
    ):
        if needed not in names:
            raise UserError(f"{source} is no model directory: it has no {needed}{advice}")
    if not any(path.suffix == ".safetensors" for path in paths):
        raise UserError(f"{source} has no weights in safetensors files; others are not read")
    states = [(path, path.stat()) for path in paths]
    return paths, "".join(f"{path}\t{state.st_size}\t{state.st_mtime_ns}\n" for path, state in states)


def _read_note(target: Path) -> str | None:
    try:
        return (target / _NOTE).read_text()
    except OSError:
        return None


def _read(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not readable: {error}") from error
    if not isinstance(fields, dict):
        raise UserError(f"{path} is not a JSON object")
    return fields


def _read_optional(path: Path) -> dict[str, Any]:
    return _read(path) if path.exists() else {}


def _whole(source: Path, config: dict[str, Any], names: tuple[str, ...]) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    raise UserError(f"{source / 'config.json'} has no {names[0]}")


def _token_ids(value: Any) -> tuple[int, ...]:
    """Of a field that is an id, a list of ids, or absent."""
    values = value if isinstance(value, list) else [value]
    return tuple(each for each in values if isinstance(each, int) and not isinstance(each, bool))


def _token_id_of(tokenizer: dict[str, Any], token: Any) -> int | None:
    """The id of a special token that the tokenizer's config names, as text or as an object with its content."""
    content = token.get("content") if isinstance(token, dict) else token
    ids = [added.get("id") for added in tokenizer.get("added_tokens", []) if added.get("content") == content]
    return ids[0] if ids and isinstance(content, str) else None
