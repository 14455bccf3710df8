"""The GPU check runs to its end without a GPU."""

import json
import subprocess
import sys

import pytest

from bench.gpu_check.measure import Measurement, table, union_seconds
from tests.support.paged_attention import need_triton


@pytest.mark.parametrize(
    ("intervals", "seconds"),
    [([], 0), ([(1, 3)], 2), ([(5, 6), (1, 3), (2, 4)], 4), ([(0, 9), (1, 2), (3, 10)], 10)],
)
def test_the_device_is_busy_while_any_kernel_runs(intervals, seconds):
    assert union_seconds(intervals) == seconds


def test_the_table_has_a_line_for_each_number_of_requests():
    one = Measurement(
        requests=64, tokens_per_s=1234.5, decode_tokens_per_s=2000, step_ms=32, replay_ms=30, busy_share=0.9
    )
    lines = table([one]).splitlines()
    assert len(lines) == 2
    assert lines[1].split() == ["64", "1234.5", "2000.0", "32.000", "30.000", "90.0%"]


def test_the_dry_check_exercises_everything_but_the_device(tmp_path):
    need_triton()
    command = [sys.executable, "-m", "bench.gpu_check", "--dry", "--out", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads((tmp_path / "dry.json").read_text())
    assert report["is_dry"]
    assert report["have_tests_passed"]
    assert [each["requests"] for each in report["measurements"]] == [1, 2]
    assert all(each["tokens_per_s"] > 0 and each["replay_ms"] > 0 for each in report["measurements"])
    assert all(0 < each["busy_share"] <= 1 for each in report["measurements"])
    assert "replay ms" in result.stdout
