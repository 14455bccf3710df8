"""What this process may use of its machine: processors and memory, after affinity and control groups. No torch."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

from gpu_worker.engine.control_groups import control_groups

_ROOT = Path("/")


def available_threads(root: Path = _ROOT) -> int:
    """Processors this process can keep busy: its affinity, cut by the quota of every control group it is in. At least 1.

    `root` is where /proc and the control groups are looked up.
    """
    num_processors = len(os.sched_getaffinity(0))
    # Rounded up: half a processor of quota is better used by a thread of its own than left idle.
    quotas = [math.ceil(quota) for quota in _cpu_quotas(root)]
    return max(1, min([num_processors, *quotas]))


def available_memory_bytes(root: Path = _ROOT) -> int:
    """Memory that can still be taken: the machine's, cut by what the limit of every control group leaves."""
    amounts = {line.split(":")[0]: line.split()[1] for line in _read(root / "proc/meminfo").splitlines() if ":" in line}
    return max(0, min([int(amounts["MemAvailable"]) * 1024, *_memory_left(root)]))


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Processors per period, of each group that has a quota."""
    groups = control_groups("cpu", root=root)
    for group in groups.v2:
        fields = _read(group / "cpu.max").split()
        if fields and fields[0] != "max":
            yield int(fields[0]) / int(fields[1])
    for group in groups.v1:
        quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        if quota > 0 and period > 0:  # -1 is no quota
            yield quota / period


def _memory_left(root: Path) -> Iterator[int]:
    """Bytes that each group with a limit still admits. File pages the kernel gives back under pressure count as used in
    its books, and as free here."""
    groups = control_groups("memory", root=root)
    for group in groups.v2:
        limit = _read(group / "memory.max").strip()
        if limit and limit != "max":
            yield int(limit) - _number(group / "memory.current") + _counter(group, "inactive_file")
    for group in groups.v1:
        # Without a limit it is the largest multiple of the page size: more than any machine has, so nothing to except.
        if (at_most := _number(group / "memory.limit_in_bytes")) > 0:
            yield at_most - _number(group / "memory.usage_in_bytes") + _counter(group, "total_inactive_file")


def _counter(group: Path, name: str) -> int:
    counts = dict(line.split()[:2] for line in _read(group / "memory.stat").splitlines() if " " in line)
    return int(counts.get(name, 0))


def _number(path: Path) -> int:
    """0 when there is no such file."""
    return int(_read(path).strip() or 0)


def _read(path: Path) -> str:
    """Empty when there is no such file: no control group, no limit."""
    try:
        return path.read_text()
    except OSError:
        return ""
