"""Reads the weights of a model directory: one mapped safetensors file, or shards with an index."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from service_kit.model_manifest import ModelFilesError

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_NAMES_SHOWN = 5
_FLOATING = (torch.float32, torch.float16, torch.bfloat16)


class WeightsError(ModelFilesError):
    """Tensors that are missing, unexpected, of another shape or type, each named."""


def load_weights(
    directory: Path,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    ignored_suffixes: tuple[str, ...],
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Exactly the tensors of `shapes`, as `dtype` on `device`.

    A tensor whose name ends with one of `ignored_suffixes` may be there and is not read. Raises WeightsError.
    """
    file_by_tensor = _locate(directory)
    missing = sorted(shapes.keys() - file_by_tensor.keys())
    unexpected = sorted(name for name in file_by_tensor.keys() - shapes.keys() if not name.endswith(ignored_suffixes))
    for kind, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
            raise WeightsError(f"{directory}: {kind} tensors: {', '.join(names[:_NAMES_SHOWN])}{more}")
    weights: dict[str, torch.Tensor] = {}
    for file in sorted({file_by_tensor[name] for name in shapes}):
        wanted = {name: shape for name, shape in shapes.items() if file_by_tensor[name] == file}
        weights |= _read_file(file, wanted, device, dtype)
    return weights


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
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path}: not readable as safetensors: {error}") from error


def _read_file(
    path: Path, shapes: Mapping[str, tuple[int, ...]], device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    with safe_open(path, framework="pt") as file:
        for name, shape in shapes.items():
            tensor = file.get_tensor(name)
            if tuple(tensor.shape) != shape:
                raise WeightsError(f"{path}: {name} has shape {tuple(tensor.shape)}, the config asks for {shape}")
            if tensor.dtype not in _FLOATING:
                raise WeightsError(f"{path}: {name} is {tensor.dtype}, not a floating-point type that is computed")
            weights[name] = tensor.to(device=device, dtype=dtype)
    return weights
