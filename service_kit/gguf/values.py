"""Reads numbers, texts and lists from the bytes of a GGUF file, in order. Pure."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service_kit.gguf.errors import GgufError

_STRING, _ARRAY = 8, 9
_FORMATS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_LENGTH = struct.Struct("<Q")
_MAX_NAME_BYTES = 65535
_MAX_BYTES = 128 << 20
"""Of all that is read: vocabularies of a million tokens take less, and a damaged length cannot ask for more memory."""
_MAX_ITEMS = 4 << 20
"""Of a list: a number takes up to 40 bytes of memory, however few it takes in the file."""


class ValueReader:
    """A position in the bytes of a file. Each method raises GgufError; `field` says in it what was being read."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self._path = path
        self._data = data
        self._end = min(len(data), _MAX_BYTES)
        self.offset = 0
        self.field = "header"

    def refuse(self, message: str) -> GgufError:
        """The error to raise about the current field."""
        return GgufError(self._path, self.field, message)

    def number(self, kind: str) -> int:
        """One little-endian whole number of a struct format."""
        return int(self._unpack(f"<{kind}")[0])

    def numbers(self, kind: str, count: int) -> tuple[Any, ...]:
        """`count` little-endian numbers of a struct format."""
        if count * struct.calcsize(f"<{kind}") > self._left:
            raise self._ended()
        return self._unpack(f"<{count}{kind}")

    def name(self) -> str:
        """The name of a field or tensor."""
        if self._left >= _LENGTH.size and _LENGTH.unpack_from(self._data, self.offset)[0] > _MAX_NAME_BYTES:
            raise self.refuse("followed by a name that is too long to be one; the file is damaged")
        return self.text()

    def text(self) -> str:
        return self._texts(1)[0]

    def value(self) -> Any:
        """A value behind its type: a number, a text, a truth value, or a list of one of them."""
        kind = self.number("I")
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.numbers(self._format(kind), 1)[0]
        item_kind, count = self.number("I"), self.number("Q")
        if count > _MAX_ITEMS:
            raise self.refuse(f"a list of {count} entries, which is more than any file has; the file is damaged")
        if item_kind == _STRING:
            return self._texts(count)
        return list(self.numbers(self._format(item_kind), count))

    @property
    def _left(self) -> int:
        return self._end - self.offset

    def _format(self, kind: int) -> str:
        if kind not in _FORMATS:
            raise self.refuse(f"has a value of type {kind}, which is not known")
        return _FORMATS[kind]

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        size = struct.calcsize(layout)
        if size > self._left:
            raise self._ended()
        values = struct.unpack_from(layout, self._data, self.offset)
        self.offset += size
        return values

    def _texts(self, count: int) -> list[str]:
        if count * _LENGTH.size > self._left:
            raise self._ended()
        data, offset, end = self._data, self.offset, self._end
        texts: list[str] = []
        try:
            for _ in range(count):
                start = offset + _LENGTH.size
                offset = start + _LENGTH.unpack_from(data, offset)[0]
                if offset > end:
                    raise self._ended()
                texts.append(str(data[start:offset], "utf-8"))
        except struct.error as error:
            raise self._ended() from error
        except UnicodeDecodeError as error:
            raise self.refuse(f"text number {len(texts)} is not UTF-8") from error
        self.offset = offset
        return texts

    def _ended(self) -> GgufError:
        if self._end < len(self._data):
            return self.refuse(f"goes on behind the first {_MAX_BYTES >> 20} MiB; the file is damaged")
        return self.refuse("the file ends inside it; it is truncated or damaged")
