"""A GGUF file that a person names becomes a model of the cache, where all services look for models: by a link, not a copy."""

import tempfile
from pathlib import Path

from service_kit.gguf.files import is_gguf, model_name, part_paths
from service_kit.gguf.header import read_header
from service_kit.model_manifest import ModelFilesError, find_model, read_manifest
from service_kit.tokenizer_files import read_tokenizer_text
from sluice.errors import UserError
from sluice.home import Home


def bring_gguf(home: Home, text: str) -> str:
    """The name of the model in the file at `text`, which is in the cache then. Raises UserError.

    A link that is there already and leads elsewhere is replaced: the file that was named last has the name.
    """
    path = Path(text).expanduser().absolute()
    name = model_name(path)
    if name.startswith("."):
        raise UserError(f"{path.name!r} gives no model name: rename the file")
    try:
        read_manifest(path)
        _check(path)
    except ModelFilesError as error:
        raise UserError(f"this file cannot be served: {error}") from error
    if path.parent == home.models.absolute():
        return name
    present = find_model(home.models, name)
    if present is not None and not (is_gguf(present) and present.is_symlink()):
        raise UserError(
            f"a model {name} is in {present} already; rename {path.name}, or serve that one: --model {name}"
        )
    home.models.mkdir(parents=True, exist_ok=True)
    for part in reversed(part_paths(path)):  # the first part, which makes it a model, comes last
        _link(home.models / part.name, part)
    return name


def is_file_name(text: str) -> bool:
    """Whether `--model` names a file and not a model of the cache."""
    return is_gguf(Path(text))


def _check(path: Path) -> None:
    """What gateway and worker would refuse it for, before anything is started. Raises ModelFilesError."""
    from gpu_worker.artifacts.gguf_tensors import GgufTensors  # noqa: PLC0415 - numpy and gguf take a second to load
    from gpu_worker.models.config import read_model_config  # noqa: PLC0415
    from gpu_worker.models.llama_tensors import tensor_shapes  # noqa: PLC0415

    read_tokenizer_text(path)
    GgufTensors(read_header(path)).require(tensor_shapes(read_model_config(path)))


def _link(link: Path, target: Path) -> None:
    """In one step: a reader finds the old file or the new one."""
    if link.is_symlink() and link.readlink() == target:
        return
    if link.exists() and not link.is_symlink():
        raise UserError(f"{link} is there already; move it away, or serve it by its name")
    with tempfile.TemporaryDirectory(dir=link.parent, prefix=".link-") as work:
        made = Path(work) / link.name
        made.symlink_to(target)
        made.replace(link)
