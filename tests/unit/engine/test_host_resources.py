import os

import pytest

from gpu_worker.engine.control_groups import control_groups
from gpu_worker.engine.host_resources import available_memory_bytes, available_threads

MEMINFO = "MemTotal:       16000000 kB\nMemFree:  1 kB\nMemAvailable:    8000000 kB\n"
MACHINE_BYTES = 8_000_000 * 1024
V1_NO_LIMIT = "9223372036854771712"


class Machine:
    """A file tree that looks like /proc and /sys to the functions under test."""

    def __init__(self, root):
        self.root = root
        self.memberships, self.mounts = [], []
        self.write("proc/meminfo", MEMINFO)

    def write(self, path, text):
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def stands_in(self, membership, *, mount_point, kind, shown="/", options="rw"):
        """The process is in the group that the line of /proc/self/cgroup names; `shown` is the mount's root."""
        self.memberships.append(membership)
        self.mounts.append(f"40 30 0:29 {shown} {mount_point} rw,relatime shared:9 - {kind} {kind} {options}")
        self.write("proc/self/cgroup", "\n".join(self.memberships))
        self.write("proc/self/mountinfo", "\n".join(["30 1 8:1 / / rw - ext4 /dev/sda rw", *self.mounts]))

    def v2(self, path, *, mount_point="/sys/fs/cgroup", shown="/"):
        self.stands_in(f"0::{path}", mount_point=mount_point, kind="cgroup2", shown=shown)

    def v1(self, controllers, path, *, mount_point, shown="/"):
        self.stands_in(
            f"4:{controllers}:{path}",
            mount_point=mount_point,
            kind="cgroup",
            shown=shown,
            options=f"rw,{controllers}",
        )


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("quota", "threads"),
    [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 2), ("1 100000", 1), ("9900000 100000", 8)],
)
def test_threads_follow_affinity_and_the_quota_of_version_2(quota, threads, machine):
    machine.v2("/")
    machine.write("/sys/fs/cgroup/cpu.max", quota)
    assert available_threads(machine.root) == threads


@pytest.mark.parametrize(("quota", "threads"), [("-1", 8), ("200000", 2), ("150000", 2), ("1000", 1)])
def test_threads_follow_the_quota_of_version_1(quota, threads, machine):
    machine.v1("cpu,cpuacct", "/job", mount_point="/sys/fs/cgroup/cpu")
    machine.write("/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", quota)
    machine.write("/sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000")
    assert available_threads(machine.root) == threads


@pytest.mark.parametrize(("own", "parent", "top"), [(3, 5, 7), (5, 3, 7), (7, 5, 3)])
def test_the_smallest_quota_from_the_own_group_to_the_root_wins(own, parent, top, machine):
    machine.v2("/slice/job")
    for path, quota in (("/slice/job", own), ("/slice", parent), ("", top)):
        machine.write(f"/sys/fs/cgroup{path}/cpu.max", f"{quota}00000 100000")
    machine.write("/sys/fs/cgroup/slice/other/cpu.max", "100000 100000")
    assert available_threads(machine.root) == 3


def test_in_hybrid_mode_the_controller_counts_where_it_is(machine):
    machine.v1("cpu", "/job", mount_point="/sys/fs/cgroup/cpu")
    machine.v2("/", mount_point="/sys/fs/cgroup/unified")
    machine.write("/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "200000")
    machine.write("/sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "50000")
    assert available_threads(machine.root) == 4


def test_another_controllers_group_does_not_count(machine):
    machine.v1("memory", "/job", mount_point="/sys/fs/cgroup/memory")
    machine.write("/sys/fs/cgroup/memory/job/cpu.cfs_quota_us", "100000")
    machine.write("/sys/fs/cgroup/memory/job/cpu.cfs_period_us", "100000")
    assert available_threads(machine.root) == 8


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/docker/abc", "/docker/abc"),  # the host's path, and the mount shows that very group
        ("/docker/abc", "/elsewhere"),  # a path that the mount does not show
        ("/../..", "/"),  # above the root of the namespace
    ],
)
def test_in_a_container_the_mount_point_is_the_group(path, shown, machine):
    machine.v2(path, shown=shown)
    machine.write("/sys/fs/cgroup/cpu.max", "200000 100000")
    assert available_threads(machine.root) == 2


def test_below_a_mount_that_shows_a_group_the_rest_of_the_path_counts(machine):
    machine.v2("/docker/abc/inner", shown="/docker/abc")
    machine.write("/sys/fs/cgroup/inner/cpu.max", "200000 100000")
    machine.write("/sys/fs/cgroup/cpu.max", "300000 100000")
    assert available_threads(machine.root) == 2


def test_a_mount_point_with_a_space_is_found(machine):
    machine.v2("/", mount_point=r"/sys/my\040groups")
    machine.write("/sys/my groups/cpu.max", "200000 100000")
    assert available_threads(machine.root) == 2


def test_without_control_groups_affinity_and_machine_decide(machine):
    assert control_groups("cpu", root=machine.root).v1 == ()
    assert available_threads(machine.root) == 8
    assert available_memory_bytes(machine.root) == MACHINE_BYTES


@pytest.mark.parametrize(
    ("limit", "available"), [("max", MACHINE_BYTES), ("1000000000", 1_000_000_000 - (400_000_000 - 100_000_000))]
)
def test_memory_is_what_the_machine_and_a_group_of_version_2_leave(limit, available, machine):
    machine.v2("/job")
    machine.write("/sys/fs/cgroup/job/memory.max", limit)
    machine.write("/sys/fs/cgroup/job/memory.current", "400000000")
    machine.write("/sys/fs/cgroup/job/memory.stat", "anon 300000000\ninactive_file 100000000")
    assert available_memory_bytes(machine.root) == available


@pytest.mark.parametrize(
    ("limit", "available"), [(V1_NO_LIMIT, MACHINE_BYTES), ("1000000000", 1_000_000_000 - (400_000_000 - 100_000_000))]
)
def test_memory_is_what_the_machine_and_a_group_of_version_1_leave(limit, available, machine):
    machine.v1("memory", "/job", mount_point="/sys/fs/cgroup/memory")
    machine.write("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", limit)
    machine.write("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", "400000000")
    machine.write("/sys/fs/cgroup/memory/job/memory.stat", "inactive_file 7\ntotal_inactive_file 100000000")
    assert available_memory_bytes(machine.root) == available


def test_an_ancestor_that_is_fuller_than_the_own_group_decides(machine):
    machine.v2("/slice/job")
    for path, limit, used in (("/slice/job", 900, 100), ("/slice", 1000, 950)):
        machine.write(f"/sys/fs/cgroup{path}/memory.max", str(limit))
        machine.write(f"/sys/fs/cgroup{path}/memory.current", str(used))
    assert available_memory_bytes(machine.root) == 50


def test_a_control_group_over_its_limit_leaves_nothing(machine):
    machine.v2("/")
    machine.write("/sys/fs/cgroup/memory.max", "100")
    machine.write("/sys/fs/cgroup/memory.current", "200")
    assert available_memory_bytes(machine.root) == 0
