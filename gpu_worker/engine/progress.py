"""Memory shared by engine and service process: what a dead or hung engine was doing when it stopped."""

import mmap
import struct
import tempfile
from collections.abc import Iterable
from typing import BinaryIO, cast

_FIELDS = struct.Struct("<Qd")
_NEW_STEP_WEIGHT = 0.1
_UNTRIED = struct.Struct("<I")
_UNTRIED_START = _FIELDS.size + _UNTRIED.size
_PAGE_BYTES = 1 << 16
_NOT_KNOWN = 0


class ProgressPage:
    """A turn counter, the usual seconds of a step, and the untried sequences of the step that runs, in memory that a file
    descriptor names. It outlives its writer, however that ends.

    One writer (the engine's process), one reader. A torn read of the counters costs the reader one look. The untried ones
    are read after the writer's death only; their length is written last, so half a list is never read.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._page = mmap.mmap(file.fileno(), _PAGE_BYTES)
        self._turns = 0
        self._step_s = 0.0

    @classmethod
    def create(cls) -> "ProgressPage":
        """A new page; pass `fileno` on to the engine process."""
        file = tempfile.TemporaryFile(prefix="sluice-progress-")  # noqa: SIM115 - the page owns it
        file.write(bytes(_PAGE_BYTES))
        file.flush()
        return cls(cast("BinaryIO", file))

    @classmethod
    def open(cls, fd: int) -> "ProgressPage":
        """The page behind a descriptor that was passed on."""
        return cls(cast("BinaryIO", open(fd, "r+b", buffering=0)))

    def fileno(self) -> int:
        return self._file.fileno()

    def turn(self) -> None:
        """The writer's loop went round once more."""
        self._turns += 1
        self._write()

    def step_took(self, seconds: float) -> None:
        """The writer ran a step; updates the usual duration."""
        weight = _NEW_STEP_WEIGHT if self._step_s else 1.0
        self._step_s += weight * (seconds - self._step_s)
        self._write()

    def note_untried(self, sequence_ids: Iterable[str]) -> None:
        """The writer begins with something that could be its last, and these sequences have not been through it before.
        More than the page holds count as not known."""
        self.forget_untried()
        listed = "\n".join(sequence_ids).encode()
        if _UNTRIED_START + len(listed) > _PAGE_BYTES:
            return
        self._page[_UNTRIED_START : _UNTRIED_START + len(listed)] = listed
        _UNTRIED.pack_into(self._page, _FIELDS.size, len(listed) + 1)

    def forget_untried(self) -> None:
        """The writer got through it."""
        _UNTRIED.pack_into(self._page, _FIELDS.size, _NOT_KNOWN)

    def read_untried(self) -> tuple[str, ...] | None:
        """What the last `note_untried` named; None when the writer was not in such a place."""
        (length,) = _UNTRIED.unpack_from(self._page, _FIELDS.size)
        if length == _NOT_KNOWN:
            return None
        listed = bytes(self._page[_UNTRIED_START : _UNTRIED_START + length - 1]).decode()
        return tuple(listed.split("\n")) if listed else ()

    def read(self) -> tuple[int, float]:
        """Turns so far, and the usual seconds of a step."""
        turns, step_s = _FIELDS.unpack_from(self._page)
        return int(turns), float(step_s)

    def close(self) -> None:
        self._page.close()
        self._file.close()

    def _write(self) -> None:
        _FIELDS.pack_into(self._page, 0, self._turns, self._step_s)
