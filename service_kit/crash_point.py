"""Named places at which a test may kill the process, to prove what repairs the half-done work.

A process that was started with a crash file dies by SIGKILL at the first place whose name stands in that file; the file
is removed first, so a restarted process goes on. Without a crash file a place costs one attribute read.
"""

import os
import signal
from pathlib import Path


class CrashPoints:
    """The places of one process; `path` None switches them off."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    def hit(self, name: str) -> None:
        """Dies here when the crash file names this place."""
        if self._path is None:
            return
        try:
            if self._path.read_text().strip() != name:
                return
            self._path.unlink()
        except FileNotFoundError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
