"""All tests, in groups side by side: `python -m tests` (or `make test`). Further arguments go to every pytest.

`pytest` alone runs the same tests one after the other. Those of whole processes mostly wait, often with a limit of time, and
the others mostly compute: the latter yield the processor. A directory that is not named belongs to them.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_NOTHING_COLLECTED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Tests of one process; a positive `niceness` yields to the other groups."""

    name: str
    arguments: tuple[str, ...]
    niceness: int = 0
    environment: dict[str, str] = field(default_factory=dict)


_WAITING = ("tests/e2e", "tests/chaos", "tests/integration/worker")
_COMPUTING_TOO = "tests/e2e/test_real_model.py"
_OTHERS = sorted({f"tests/{path.parts[1]}" for path in Path("tests").glob("**/test_*.py")} - set(_WAITING))
GROUPS = (
    Group(name="waiting", arguments=(*_WAITING, f"--ignore={_COMPUTING_TOO}")),
    # One thread of torch: two would often wait for each other, while the other group has a processor.
    Group(
        name="computing",
        arguments=(*_OTHERS, _COMPUTING_TOO, *(f"--ignore={path}" for path in _WAITING)),
        niceness=5,
        environment={"OMP_NUM_THREADS": "1"},
    ),
)


def main(arguments: Sequence[str]) -> int:
    """Runs every group to its end; the exit status is 0 when all tests passed. An interrupt ends each orderly."""
    started_s = time.monotonic()
    running = [(group, _start(group, arguments)) for group in GROUPS]

    def interrupt(*_: object) -> None:
        for _, process in running:
            process.send_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    readers = [threading.Thread(target=_tell, args=(group, process)) for group, process in running]
    for reader in readers:
        reader.start()
    codes = [process.wait() for _, process in running]
    for reader in readers:
        reader.join()
    told = ", ".join(f"{group.name}: exit status {process.returncode}" for group, process in running)
    print(f"{told}; {time.monotonic() - started_s:.0f} s", flush=True)
    failed = [code for code in codes if code not in (0, _NOTHING_COLLECTED)]
    return 1 if failed or all(code == _NOTHING_COLLECTED for code in codes) else 0


def _start(group: Group, arguments: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "pytest", *group.arguments, "-o", f"cache_dir=.pytest_cache/{group.name}"]
    return subprocess.Popen(
        ["nice", "-n", str(group.niceness), *command, *arguments],
        env={**os.environ, **group.environment},
        process_group=0,  # an interrupt of the terminal comes once, through this process
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _tell(group: Group, process: subprocess.Popen[str]) -> None:
    """Its lines as they come, behind its name."""
    assert process.stdout is not None
    for line in process.stdout:
        sys.stdout.write(f"{group.name:<9} | {line}")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
