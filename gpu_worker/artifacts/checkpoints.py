"""The weights of a model, whether it is a directory of safetensors files or a GGUF file."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch

from gpu_worker.artifacts.weights import Checkpoint, WeightsError
from service_kit.gguf.files import is_gguf
from service_kit.gguf.header import read_header


class TensorSource(Protocol):
    """Exactly the tensors of a model, of which nothing is held."""

    def read(self, names: Iterable[str], *, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Tensors as `dtype` on `device`."""
        ...


class GgufCheckpoint:
    """Implements TensorSource: one GGUF file. Each read dequantizes its tensors one by one, in fp32, and converts then."""

    def __init__(self, path: Path, *, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Looks at all tensors, so that nothing is missing later. Raises GgufError and WeightsError."""
        from gpu_worker.artifacts.gguf_tensors import GgufTensors  # noqa: PLC0415 - not loaded for other files

        self._tensors = GgufTensors(read_header(path), num_threads=torch.get_num_threads())
        self._tensors.require(shapes)

    def read(self, names: Iterable[str], *, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(self._tensors.read(name)).to(device=device, dtype=dtype) for name in names}


def open_checkpoint(
    model: Path,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    ignored_suffixes: tuple[str, ...],
    int8_names: Collection[str] = frozenset(),
) -> TensorSource:
    """As Checkpoint's constructor. Raises WeightsError, GgufError."""
    if not is_gguf(model):
        return Checkpoint(model, shapes=shapes, ignored_suffixes=ignored_suffixes, int8_names=int8_names)
    if int8_names:
        raise WeightsError(f"{model}: a GGUF file has no weights of our int8")
    return GgufCheckpoint(model, shapes=shapes)
