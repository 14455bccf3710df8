"""The append-only file of Valkey: how long it was at each moment, so that its last seconds can be cut off."""

import asyncio
import os
import time
from collections import deque
from pathlib import Path

_SAMPLE_S = 0.05
_KEPT = 200


class AppendOnlyFile:
    """Samples the size of the file that is being written; the last 10 s are known."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "appendonlydir"
        self._samples: deque[tuple[float, Path, int]] = deque(maxlen=_KEPT)

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            self.sample(now_s=time.monotonic())
            await asyncio.sleep(_SAMPLE_S)

    def sample(self, *, now_s: float) -> None:
        path = self._current()
        if path is not None:
            self._samples.append((now_s, path, path.stat().st_size))

    def cut_back(self, seconds: float, *, now_s: float) -> int:
        """Shortens the file to what it was so long ago, as far as that is known; returns the bytes taken off. The server
        must not run."""
        path = self._current()
        if path is None:
            return 0
        size = path.stat().st_size
        known = [(at_s, length) for at_s, sampled, length in self._samples if sampled == path]
        older = [length for at_s, length in known if at_s <= now_s - seconds] or [length for _, length in known[:1]]
        kept = min(size, older[-1] if older else size)
        os.truncate(path, kept)
        return size - kept

    def _current(self) -> Path | None:
        """The newest increment."""
        found = sorted(self._directory.glob("*.incr.aof"), key=lambda path: path.stat().st_mtime_ns)
        return found[-1] if found else None
