"""Loading of the CPU kernels, and what serves without them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from gpu_worker.attention.factory import make_attention
from gpu_worker.attention.port import AttentionShape
from gpu_worker.kernels import build, library
from gpu_worker.kernels.library import CpuKernels, KernelsUnavailableError, load_cpu_kernels
from gpu_worker.layers.activation import silu_and_multiply
from gpu_worker.layers.norm import rms_norm
from gpu_worker.layers.rope import RotaryTable
from tests.support.paged_attention import need_kernels

SHAPE = AttentionShape(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, num_blocks=3, block_size=4)
CPU = torch.device("cpu")


@pytest.fixture
def without_library(tmp_path, monkeypatch):
    """A process whose package has no compiled library."""
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "missing.so")
    load_cpu_kernels.cache_clear()
    yield
    load_cpu_kernels.cache_clear()


def layer_results() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows, heads = torch.randn(5, 24, generator=generator), torch.randn(5, 3, 8, generator=generator)
    rotation = RotaryTable(torch.rand(4, generator=generator), num_positions=9, dtype=torch.float32).at(torch.arange(5))
    in_place = heads.clone()
    rms_norm(in_place[:, 1:], rows[0, :8], 1e-5, out=in_place[:, 1:])
    return [rms_norm(rows, rows[0], 1e-5), in_place, silu_and_multiply(rows), rotation.apply(heads)]


def test_without_the_library_torch_serves_and_the_reason_is_logged_once(without_library, monkeypatch):
    with capture_logs() as logs:
        backend = make_attention(SHAPE, device=CPU, dtype=torch.float32)
        slow = layer_results()
    assert (backend.name, backend.is_batch_invariant) == ("reference", False)
    reasons = [line["reason"] for line in logs if line["event"] == "cpu_kernels_unavailable"]
    assert len(reasons) == 1
    assert "was not built" in reasons[0]
    load_cpu_kernels.cache_clear()
    monkeypatch.setattr(build, "LIBRARY", build.DIRECTORY / "cpu_kernels.so")
    need_kernels()
    for fast, other in zip(layer_results(), slow, strict=True):
        torch.testing.assert_close(fast, other, rtol=1e-5, atol=1e-6)


def test_the_instructions_that_the_kernels_use_are_logged_and_can_be_held_back():
    load_cpu_kernels.cache_clear()
    with capture_logs() as logs:
        kernels = load_cpu_kernels()
    if kernels is None:
        pytest.skip("no compiled CPU kernels")
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split()
    wanted = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}
    expected = "avx512-vnni" if wanted <= set(flags) else "avx2"
    assert [line["instructions"] for line in logs if line["event"] == "cpu_kernels_loaded"] == [expected]
    assert kernels.functions.sluice_use_avx512(0) == 0
    assert kernels.instructions == "avx2"
    kernels.functions.sluice_use_avx512(1)
    assert kernels.instructions == expected


def test_fp32_on_the_cpu_gets_the_kernels_and_other_types_the_reference():
    need_kernels()
    backend = make_attention(SHAPE, device=CPU, dtype=torch.float32)
    assert (backend.name, backend.is_batch_invariant) == ("cpu", True)
    with capture_logs() as logs:
        assert make_attention(SHAPE, device=CPU, dtype=torch.bfloat16).name == "reference"
    assert logs[0]["reason"] == "not fp32 on a CPU"


def test_a_library_of_other_sources_is_not_used(tmp_path):
    need_kernels()
    copy = tmp_path / "stale.so"
    copy.write_bytes(build.LIBRARY.read_bytes().replace(build.source_hash().encode(), b"0123456789abcdef"))
    with pytest.raises(KernelsUnavailableError, match="built from other sources"):
        CpuKernels(copy)


def test_a_file_that_is_no_library_is_not_used(tmp_path):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(KernelsUnavailableError, match="cannot be loaded"):
        CpuKernels(broken)


def test_a_cpu_without_the_instructions_is_named(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu sse2 avx fma f16c\n")
    with pytest.raises(KernelsUnavailableError, match="this CPU lacks avx2"):
        library._check_cpu(cpuinfo)


def test_a_build_without_a_compiler_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build.CompileError, match="no C\\+\\+ compiler"):
        build.compile_library(tmp_path / "kernels.so")
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    build.main()
    assert "CPU kernels not built" in capsys.readouterr().out


def test_a_compiler_that_fails_leaves_the_old_library_in_place(monkeypatch, tmp_path):
    target = tmp_path / "kernels.so"
    target.write_bytes(b"old")
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(build.CompileError, match="false failed"):
        build.compile_library(target)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


ONE_POOL = """
import os, pathlib, torch
torch.set_num_threads(4)
from gpu_worker.layers.activation import silu_and_multiply
from gpu_worker.kernels.library import load_cpu_kernels
assert load_cpu_kernels() is not None
threads = lambda: len(os.listdir("/proc/self/task"))
before = threads()
silu_and_multiply(torch.zeros(64, 4096))
during = threads()
torch.zeros(4096, 4096).exp()
after = threads()
names = {line.split()[-1] for line in pathlib.Path("/proc/self/maps").read_text().splitlines() if "omp" in line}
print(during - before, after - during, len([name for name in names if pathlib.Path(name).name.startswith("lib")]))
"""


def test_the_kernels_run_on_as_many_threads_as_torch_is_set_to_and_share_them():
    need_kernels()
    done = subprocess.run([sys.executable, "-c", ONE_POOL], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert done.stdout.splitlines()[-1] == "3 0 1"
