"""How busy the machine was, and how much of that was the bench and its stack: a disturbed run is told by the difference."""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from bench.figures import Figure

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTimes:
    """Seconds of processor time, over all cores."""

    at_s: float
    busy_s: float
    own_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuShares:
    """Shares of the whole machine, 0 to 1."""

    busy: float
    own: float
    load: float
    """Load average of the last minute."""

    def figures(self, name: str, *, own_at_most: float | None = None) -> Iterable[Figure]:
        note = f"machine {self.busy:.0%} busy, load average {self.load:.1f} on {os.cpu_count()} cores"
        yield Figure(name=f"{name}: own CPU, % of the machine", value=100 * self.own, at_most=own_at_most, note=note)


class CpuMeter:
    """Reads /proc. `pids` names the processes that the bench started; their descendants and the bench itself count too."""

    def __init__(self, pids: Callable[[], Iterable[int]]) -> None:
        self._pids = pids
        self._before = self._read()

    def restart(self) -> None:
        self._before = self._read()

    def shares(self) -> CpuShares:
        """Since the start or restart."""
        before, now = self._before, self._read()
        all_s = (now.at_s - before.at_s) * (os.cpu_count() or 1)
        return CpuShares(
            busy=(now.busy_s - before.busy_s) / all_s,
            own=max(0.0, now.own_s - before.own_s) / all_s,
            load=os.getloadavg()[0],
        )

    def _read(self) -> CpuTimes:
        user, nice, system, _idle, _iowait, irq, softirq, *_ = map(
            int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        )
        own = _ticks_of_trees({os.getpid(), *self._pids()})
        return CpuTimes(
            at_s=time.monotonic(),
            busy_s=(user + nice + system + irq + softirq) / _TICKS_PER_S,
            own_s=own / _TICKS_PER_S,
        )


def _ticks_of_trees(roots: set[int]) -> int:
    """Ticks of the processes, their descendants, and the descendants that have ended."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        try:
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(directory.name)
        parents[pid] = int(fields[1])
        ticks[pid] = sum(map(int, fields[11:15]))

    def is_own(pid: int) -> bool:
        while pid and pid not in roots:
            pid = parents.get(pid, 0)
        return pid in roots

    return sum(count for pid, count in ticks.items() if is_own(pid))
