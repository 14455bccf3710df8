import os

import pytest

from gpu_worker.engine.host_resources import available_memory_bytes, available_threads

MEMINFO = "MemTotal:       16000000 kB\nMemFree:  1 kB\nMemAvailable:    8000000 kB\n"


@pytest.mark.parametrize(
    ("quota", "threads"), [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 2), ("1 100000", 1)]
)
def test_threads_follow_affinity_and_quota(quota, threads, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    (tmp_path / "cpu.max").write_text(quota)
    assert available_threads(tmp_path) == threads


def test_without_a_control_group_the_affinity_decides(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert available_threads(tmp_path / "absent") == 2


@pytest.mark.parametrize(
    ("limit", "available"), [("max", 8_000_000 * 1024), ("1000000000", 1_000_000_000 - (400_000_000 - 100_000_000))]
)
def test_memory_is_what_the_machine_and_the_control_group_leave(limit, available, tmp_path):
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text("400000000\n")
    (tmp_path / "memory.stat").write_text("anon 300000000\ninactive_file 100000000\n")
    assert available_memory_bytes(tmp_path, tmp_path / "meminfo") == available


def test_a_control_group_over_its_limit_leaves_nothing(tmp_path):
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "memory.max").write_text("100")
    (tmp_path / "memory.current").write_text("200")
    assert available_memory_bytes(tmp_path, tmp_path / "meminfo") == 0
