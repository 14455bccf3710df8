"""Reads the weights of a model directory: one mapped safetensors file, or shards with an index."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gpu_worker.artifacts.tensor_names import WeightsError, require_same_names

__all__ = ["Checkpoint", "WeightsError"]

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_FLOATING = frozenset({"F32", "F16", "BF16"})  # as safetensors names them
_INT8 = frozenset({"I8"})


class Checkpoint:
    """Exactly the tensors of `shapes` in a model directory. Nothing of them is held: each read maps its files anew, and the
    mapping goes, and with it the memory of its pages, when the last tensor of the read does.
    """

    def __init__(
        self,
        directory: Path,
        *,
        shapes: Mapping[str, tuple[int, ...]],
        ignored_suffixes: tuple[str, ...],
        int8_names: Collection[str] = frozenset(),
    ) -> None:
        """Looks at all headers, so that nothing is missing later.

        A tensor whose name ends with one of `ignored_suffixes` may be there and is never read. Those of `int8_names` are
        int8 and stay so, all others are of a floating-point type. Raises WeightsError.
        """
        file_by_tensor = _locate(directory)
        found = {name for name in file_by_tensor if name in shapes or not name.endswith(ignored_suffixes)}
        require_same_names(directory, shapes.keys(), found)
        self._file_by_tensor = {name: file_by_tensor[name] for name in shapes}
        self._int8_names = frozenset(int8_names)
        for file, wanted in self._by_file(shapes).items():
            _check_header(file, {name: shapes[name] for name in wanted}, self._int8_names)

    def read(self, names: Iterable[str], *, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Tensors as `dtype`, or int8, on `device`; on a CPU those that are of that type already are pages of the file."""
        tensors: dict[str, torch.Tensor] = {}
        for path, wanted in self._by_file(names).items():
            with _open(path) as file:
                for name in wanted:
                    kept = torch.int8 if name in self._int8_names else dtype
                    tensors[name] = file.get_tensor(name).to(device=device, dtype=kept)
        return tensors

    def _by_file(self, names: Iterable[str]) -> dict[Path, list[str]]:
        names_by_file: dict[Path, list[str]] = {}
        for name in names:
            names_by_file.setdefault(self._file_by_tensor[name], []).append(name)
        return names_by_file


def _locate(directory: Path) -> dict[str, Path]:
    """The file of each tensor."""
    index_path = directory / _INDEX_FILE
    if not index_path.exists():
        return dict.fromkeys(_tensor_names(directory / _SINGLE_FILE), directory / _SINGLE_FILE)
    try:
        file_by_tensor = {
            str(name): str(file) for name, file in json.loads(index_path.read_text())["weight_map"].items()
        }
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(f"{index_path}: not an index of safetensors files: {error}") from error
    for file in set(file_by_tensor.values()):
        if Path(file).name != file:
            raise WeightsError(f"{index_path}: {file!r} is not the name of a file beside it")
        stands = set(_tensor_names(directory / file))
        absent = sorted(name for name, where in file_by_tensor.items() if where == file and name not in stands)
        if absent:
            raise WeightsError(f"{directory / file}: lacks {absent[0]}, which the index places there")
    return {name: directory / file for name, file in file_by_tensor.items()}


def _tensor_names(path: Path) -> list[str]:
    with _open(path) as file:
        return list(file.keys())


def _check_header(path: Path, shapes: Mapping[str, tuple[int, ...]], int8_names: frozenset[str]) -> None:
    with _open(path) as file:
        for name, shape in shapes.items():
            header = file.get_slice(name)
            if tuple(header.get_shape()) != shape:
                raise WeightsError(f"{path}: {name} has shape {tuple(header.get_shape())}, the config asks for {shape}")
            is_int8 = name in int8_names
            if header.get_dtype() not in (_INT8 if is_int8 else _FLOATING):
                wanted = "int8" if is_int8 else "a floating-point type that is computed"
                raise WeightsError(f"{path}: {name} is {header.get_dtype()}, not {wanted}")


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        file = safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path}: not readable as safetensors: {error}") from error
    with file as opened:
        yield opened
