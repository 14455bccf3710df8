"""Signals for a server with all its processes: Postgres gives each connection a process, and each its own group."""

import os
import signal
from pathlib import Path


def send_to_tree(pid: int, number: signal.Signals) -> None:
    """To a process first, then to its descendants: one that is stopped starts no further ones."""
    os.kill(pid, number)
    for descendant in _descendants(pid):
        try:
            os.kill(descendant, number)
        except ProcessLookupError:
            continue


def resident_bytes(pid: int) -> int:
    """Memory that a process has in use."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) << 10


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                fields = (directory / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(directory.name))
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found
