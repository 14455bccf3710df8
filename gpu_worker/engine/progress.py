"""A page shared by engine and service process that tells a busy engine from a hung one."""

import mmap
import struct
import tempfile
from typing import BinaryIO, cast

_FIELDS = struct.Struct("<Qd")
_NEW_STEP_WEIGHT = 0.1


class ProgressPage:
    """A turn counter and the usual seconds of a step, in memory that a file descriptor names.

    One writer (the engine's loop), one reader. A torn read costs the reader one look: it compares counters only.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._page = mmap.mmap(file.fileno(), _FIELDS.size)
        self._turns = 0
        self._step_s = 0.0

    @classmethod
    def create(cls) -> "ProgressPage":
        """A new page; pass `fileno` on to the engine process."""
        file = tempfile.TemporaryFile(prefix="sluice-progress-")  # noqa: SIM115 - the page owns it
        file.write(bytes(_FIELDS.size))
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

    def read(self) -> tuple[int, float]:
        """Turns so far, and the usual seconds of a step."""
        turns, step_s = _FIELDS.unpack_from(self._page)
        return int(turns), float(step_s)

    def close(self) -> None:
        self._page.close()
        self._file.close()

    def _write(self) -> None:
        _FIELDS.pack_into(self._page, 0, self._turns, self._step_s)
