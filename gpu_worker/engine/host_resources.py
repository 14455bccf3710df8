"""What this process may use of its machine: processors and memory, after affinity and control groups. No torch."""

import math
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_threads(cgroup: Path = _CGROUP) -> int:
    """Processors this process can keep busy: its affinity, cut by the control group's quota (v2). At least 1."""
    num_processors = len(os.sched_getaffinity(0))
    fields = _read(cgroup / "cpu.max").split()
    if fields and fields[0] != "max":
        # Rounded up: half a processor of quota is better used by a thread of its own than left idle.
        num_processors = min(num_processors, math.ceil(int(fields[0]) / int(fields[1])))
    return max(1, num_processors)


def available_memory_bytes(cgroup: Path = _CGROUP, meminfo: Path = _MEMINFO) -> int:
    """Memory that can still be taken: the machine's, cut by what the control group's limit (v2) leaves."""
    amounts = {line.split(":")[0]: line.split()[1] for line in _read(meminfo).splitlines() if ":" in line}
    available = int(amounts["MemAvailable"]) * 1024
    limit = _read(cgroup / "memory.max").strip()
    if limit and limit != "max":
        used = int(_read(cgroup / "memory.current").strip() or 0) - _reclaimable_bytes(cgroup)
        available = min(available, int(limit) - used)
    return max(0, available)


def _reclaimable_bytes(cgroup: Path) -> int:
    """File pages the kernel gives back under pressure; they count as used in memory.current."""
    counts = dict(line.split()[:2] for line in _read(cgroup / "memory.stat").splitlines() if " " in line)
    return int(counts.get("inactive_file", 0))


def _read(path: Path) -> str:
    """Empty when there is no such file: no control group, no limit."""
    try:
        return path.read_text()
    except OSError:
        return ""
