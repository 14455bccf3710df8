"""Real control groups: a process inside a group with a limit sees it."""

import contextlib
import os
import subprocess
import sys
import uuid
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpu_worker.engine.control_groups import control_groups

NUM_BYTES = 300 << 20
QUOTAS = {"cpu.cfs_quota_us": "100000", "cpu.max": "100000 100000"}
LIMITS = {"memory.limit_in_bytes": str(NUM_BYTES), "memory.max": str(NUM_BYTES)}


@contextmanager
def limited_group(controller, limits):
    """A new child of the top group that this process can see, with its limit; skips where there can be none."""
    groups = control_groups(controller)
    for top in (group for group in (groups.v1[-1:] + groups.v2[-1:]) if group.is_dir()):
        group = top / f"sluice-test-{uuid.uuid4().hex[:8]}"
        with contextlib.suppress(OSError):
            group.mkdir()
        try:
            for name, value in limits.items():
                if (group / name).exists():
                    (group / name).write_text(value)
                    yield group
                    return
        except OSError as error:
            pytest.skip(f"{group} takes no limit: {error}")
        finally:
            if group.is_dir():
                group.rmdir()
    pytest.skip(f"no group with the controller {controller} can be made here")


def said_inside(group: Path, expression: str) -> int:
    """What a process that was put into the group before it started says."""
    code = f"from gpu_worker.engine.host_resources import *; print({expression})"
    enter = f"echo $$ > '{group}/cgroup.procs' && exec \"$@\""
    command = ["sh", "-c", enter, "sh", sys.executable, "-c", code]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="with one processor a quota of one changes nothing")
def test_a_quota_of_one_processor_gives_one_thread():
    with limited_group("cpu", QUOTAS) as group:
        assert said_inside(group, "available_threads()") == 1


def test_a_memory_limit_leaves_at_most_itself():
    with limited_group("memory", LIMITS) as group:
        assert 0 < said_inside(group, "available_memory_bytes()") <= NUM_BYTES
