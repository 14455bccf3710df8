"""What a person sees: results on stdout, everything else on stderr; colours only on a terminal."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from sluice.models.pull import Progress as ProgressListener

_COLOURS = ("36", "33", "35", "32", "34", "31")
_PREFIX_WIDTH = 12


class PrefixedLog:
    """Prints lines of several processes, each behind its name in its own colour. Safe from any thread."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._is_coloured = self._stream.isatty()
        self._lock = threading.Lock()
        self._colours: dict[str, str] = {"sluice": "1"}

    def __call__(self, name: str, line: str) -> None:
        with self._lock:
            colour = self._colours.setdefault(name, _COLOURS[(len(self._colours) - 1) % len(_COLOURS)])
            prefix = f"{name:<{_PREFIX_WIDTH}}|"
            shown = f"\x1b[{colour}m{prefix}\x1b[0m" if self._is_coloured else prefix
            self._stream.write(f"{shown} {line}\n")
            self._stream.flush()


def say(text: str) -> None:
    """A line for the person, on stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def write_text(text: str) -> None:
    """A piece of a result, on stdout, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def progress_bars() -> Iterator[ProgressListener]:
    """Bars by stage, on stderr; the listener may be called from this thread only."""
    columns = (TextColumn("{task.description:<12}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def show(stage: str, fraction: float) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=1.0)
            progress.update(tasks[stage], completed=fraction)

        yield show
