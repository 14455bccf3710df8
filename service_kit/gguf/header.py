"""The header of a GGUF file: its metadata, and where its tensors lie. Pure but for reading the file.

Format: github.com/ggml-org/ggml, docs/gguf.md, versions 2 and 3, little-endian. Read here rather than with the `gguf`
package, which makes arrays of every token (seconds for a large vocabulary) and needs numpy, which gateways do not have.
"""

import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan, prod
from pathlib import Path
from typing import Any

from service_kit.gguf.errors import GgufError, UnsupportedGgufError
from service_kit.gguf.files import part_paths
from service_kit.gguf.tensor_types import SUPPORTED, type_name
from service_kit.gguf.values import ValueReader

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MAX_PARTS = 99999
_MAX_COUNT = 1 << 16
"""Of tensors and of metadata fields: a model of hundreds of layers has some thousands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One tensor in a file. `shape` is in rows before columns, as everywhere but in GGUF itself.

    `num_bytes` is known for the types that are read.
    """

    type_name: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    num_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """Metadata and tensors of one model, whose parts are all there. The getters raise GgufError naming the key."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    def refuse(self, key: str, message: str) -> GgufError:
        """The error to raise about a key that is wrong or missing."""
        return GgufError(self.path, key, message)

    def unsupported(self, key: str, message: str) -> UnsupportedGgufError:
        """The error to raise about a key that is not served."""
        return UnsupportedGgufError(self.path, key, message)

    def text(self, key: str) -> str:
        return str(_checked(self, key, str, "a text"))

    def whole(self, key: str) -> int:
        """A whole number from 0 on."""
        value: int = _checked(self, key, int, "a whole number")
        if isinstance(value, bool) or value < 0:
            raise self.refuse(key, f"{value!r} is not a whole number from 0 on")
        return value

    def whole_or_none(self, key: str) -> int | None:
        return self.whole(key) if key in self.metadata else None

    def number(self, key: str) -> float:
        return float(_checked(self, key, (int, float), "a number"))

    def flag(self, key: str, *, default: bool) -> bool:
        return bool(_checked(self, key, bool, "true or false")) if key in self.metadata else default

    def texts(self, key: str) -> list[str]:
        values: list[str] = _checked_list(self, key, str, "texts")
        return values

    def numbers(self, key: str, count: int) -> list[float]:
        """A list of numbers with `count` entries."""
        values: list[float] = _checked_list(self, key, (int, float), "numbers", count=count)
        if any(map(isnan, values)):
            raise self.refuse(key, "has an entry that is not a number")
        return values

    def wholes(self, key: str, count: int) -> list[int]:
        """A list of whole numbers with `count` entries."""
        values: list[int] = _checked_list(self, key, int, "whole numbers", count=count)
        return values

    def floats_of(self, name: str) -> tuple[float, ...]:
        """The numbers of a small F32 tensor."""
        tensor = self.tensors[name]
        if tensor.type_name != "F32" or tensor.num_bytes is None:
            raise self.refuse(name, f"of type {tensor.type_name}, not F32")
        with tensor.path.open("rb") as file:
            file.seek(tensor.offset)
            return struct.unpack(f"<{tensor.num_bytes // 4}f", file.read(tensor.num_bytes))


def read_header(path: Path) -> GgufHeader:
    """The header of the model in `path`, which is its only or its first part. Raises GgufError."""
    header = _read_part(path)
    count = header.whole_or_none("split.count") or 1
    if count == 1:
        return header
    paths = part_paths(path)
    if len(paths) != count or header.whole("split.no") != 0 or not 1 < count <= _MAX_PARTS:
        raise header.refuse(
            "split.count", f"part of {count}: name the first one, and keep the names that end in -00001-of-{count:05}"
        )
    tensors = dict(header.tensors)
    for number, part_path in enumerate(paths[1:], start=1):
        part = _read_part(part_path)
        if (part.whole("split.no"), part.whole("split.count")) != (number, count) or tensors.keys() & part.tensors:
            raise part.refuse("split.no", f"not part {number + 1} of {count} of the model that begins in {path.name}")
        tensors |= part.tensors
    expected = header.whole_or_none("split.tensors.count")
    if expected not in (None, len(tensors)):
        raise header.refuse("split.tensors.count", f"{expected}, but the parts have {len(tensors)} tensors")
    return GgufHeader(path=path, metadata=header.metadata, tensors=tensors)


def _read_part(path: Path) -> GgufHeader:
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            memoryview(data) as view,
        ):
            return _parse(path, view)
    except OSError as error:
        raise GgufError(path, "file", f"not readable: {error.strerror or error}") from error
    except ValueError as error:
        raise GgufError(path, "file", f"not readable: {error}") from error


def _parse(path: Path, data: memoryview) -> GgufHeader:
    reader = ValueReader(path, data)
    num_tensors, num_fields = _parse_beginning(reader, bytes(data[: len(_MAGIC)]))
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        key = reader.name()
        reader.field = key
        if key in metadata:
            raise reader.refuse("stands twice")
        metadata[key] = reader.value()
    found = [_parse_tensor(reader) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise GgufError(path, "general.alignment", f"{alignment!r} is not a power of two")
    start = -(-reader.offset // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, kind, shape, offset in found:
        if name in tensors:
            raise GgufError(path, name, "stands twice")
        tensors[name] = _place(path, name, kind, shape, start + offset)
        num_bytes = tensors[name].num_bytes
        if tensors[name].offset + (num_bytes or 0) > len(data):
            raise GgufError(path, name, "its numbers lie behind the end of the file, which is truncated or damaged")
    return GgufHeader(path=path, metadata=metadata, tensors=tensors)


def _parse_beginning(reader: ValueReader, magic: bytes) -> tuple[int, int]:
    """Numbers of tensors and of metadata fields."""
    reader.field = "magic"
    reader.number("I")
    if magic != _MAGIC:
        raise reader.refuse(f"begins with {magic!r}, not with {_MAGIC!r}: not a GGUF file")
    reader.field = "version"
    version = reader.number("I")
    if version not in _VERSIONS:
        is_swapped = version & 0xFFFF == 0
        raise reader.refuse("big-endian files are not read" if is_swapped else f"{version} is not read, only 2 and 3")
    return _parse_count(reader, "tensor_count"), _parse_count(reader, "kv_count")


def _parse_count(reader: ValueReader, field: str) -> int:
    reader.field = field
    count = reader.number("Q")
    if count > _MAX_COUNT:
        raise reader.refuse(f"{count} is more than any model has; the file is damaged")
    return count


def _parse_tensor(reader: ValueReader) -> tuple[str, str, tuple[int, ...], int]:
    """Name, type, shape, and where its numbers begin."""
    name = reader.name()
    reader.field = name
    num_dimensions = reader.number("I")
    if num_dimensions > _MAX_DIMENSIONS:
        raise reader.refuse(f"{num_dimensions} dimensions; the file is damaged")
    shape = tuple(reversed(reader.numbers("Q", num_dimensions)))
    return name, type_name(reader.number("I")), shape, reader.number("Q")


def _place(path: Path, name: str, kind: str, shape: Sequence[int], offset: int) -> GgufTensor:
    num_bytes = None
    if kind in SUPPORTED:
        block = SUPPORTED[kind]
        if shape and shape[-1] % block.num_values:
            raise GgufError(path, name, f"rows of {shape[-1]} numbers, {kind} stores {block.num_values} together")
        num_bytes = prod(shape) // block.num_values * block.num_bytes
    return GgufTensor(type_name=kind, shape=tuple(shape), path=path, offset=offset, num_bytes=num_bytes)


def _checked(header: GgufHeader, key: str, kind: Any, words: str) -> Any:
    """The value of a key that is there and of this kind."""
    if key not in header.metadata:
        raise header.refuse(key, "missing; the file is incomplete, or of an unknown kind")
    value = header.metadata[key]
    if not isinstance(value, kind):
        raise header.refuse(key, f"{value!r:.50} is not {words}")
    return value


def _checked_list(header: GgufHeader, key: str, kind: Any, words: str, *, count: int | None = None) -> Any:
    """A list with `count` entries, or with any number of them."""
    values = _checked(header, key, list, f"a list of {words}")
    # All entries of a list are of one type.
    if values and (not isinstance(values[0], kind) or isinstance(values[0], bool)):
        raise header.refuse(key, f"not a list of {words}")
    if count not in (None, len(values)):
        raise header.refuse(key, f"has {len(values)} entries, not {count}")
    return values
