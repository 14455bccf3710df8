"""Checks this machine's GPU: `python -m bench.gpu_check [--dry] [--out DIR]`, or `make gpu-check`. Under six minutes.

Runs the tests that need a GPU, then measures a random Llama of 1.2 billion bf16 parameters. With --dry everything but the
device is exercised: a tiny model on the CPU, interpreted kernels, and graphs that are called instead of replayed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from bench.engine.workload import Workload
from bench.gpu_check.measure import measure, table
from bench.gpu_check.random_model import ONE_BILLION, TINY, ModelSize, write_random_model
from gpu_worker.engine.loading import EngineParts, load_parts
from gpu_worker.engine.settings import EngineSettings

_TESTS = ("tests/unit/attention/test_triton.py", "tests/unit/attention/test_contract.py", "tests/unit/engine")
_LIMIT_S = 360


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What one kind of run does."""

    size: ModelSize
    dtype: torch.dtype
    device: torch.device
    settings: EngineSettings
    requests: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    num_repeats: int
    tests: tuple[str, ...]


WET = Check(
    size=ONE_BILLION,
    dtype=torch.bfloat16,
    device=torch.device("cuda"),
    settings=EngineSettings(
        device="cuda", dtype="bfloat16", max_running=256, token_budget=4096, target_step_ms=None, speculation="off"
    ),
    requests=(1, 64, 256),
    prompt_tokens=128,
    output_tokens=128,
    num_repeats=40,
    # Of the suite that all backends share, as much as compiles in the time: each shape is a kernel of its own.
    tests=(*_TESTS, "-k", "gpu or test_triton or (mixed and triton and (four or softcap))"),
)
DRY = Check(
    size=TINY,
    dtype=torch.float32,
    device=torch.device("cpu"),
    settings=EngineSettings(num_blocks=16, max_running=2, token_budget=8, target_step_ms=None, speculation="off"),
    requests=(1, 2),
    prompt_tokens=3,
    output_tokens=4,
    num_repeats=1,
    tests=(_TESTS[0], "-k", "slots or aligned"),
)


def run_tests(check: Check, limit_s: float) -> bool:
    """Whether pytest was content."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *check.tests]
    try:
        return subprocess.run(command, check=False, timeout=limit_s, stdout=sys.stderr).returncode == 0  # noqa: S603
    except subprocess.TimeoutExpired:
        print(f"the tests took more than {limit_s:.0f} s", file=sys.stderr)
        return False


def load(check: Check, directory: Path) -> EngineParts:
    write_random_model(directory, check.size, dtype=check.dtype, device=check.device)
    if check.device.type == "cuda":
        return load_parts(directory, check.settings)
    from tests.support.device_parts import load_rehearsed  # noqa: PLC0415 - needs Triton's interpreter

    return load_rehearsed(directory, check.settings)[1]


def results_of(check: Check, parts: EngineParts, *, have_tests_passed: bool) -> dict[str, object]:
    """Measures; what the JSON file says."""
    measurements = []
    for number in check.requests:
        workload = Workload(
            requests=number,
            prompt_tokens=check.prompt_tokens,
            output_tokens=check.output_tokens,
            vocab_size=check.size.vocab_size,
        )
        measurements.append(measure(parts, check.settings, workload, num_repeats=check.num_repeats))
    print(table(measurements))
    is_cuda = check.device.type == "cuda"
    return {
        "is_dry": not is_cuda,
        "device": torch.cuda.get_device_name() if is_cuda else "none",
        "torch": torch.__version__,
        "attention": "triton" if is_cuda else "triton, interpreted",
        "num_blocks": parts.capabilities.num_blocks,
        "have_tests_passed": have_tests_passed,
        "measurements": [each.as_dict() for each in measurements],
    }


def main() -> int:
    """0 when the tests passed and everything was measured within the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="exercise everything but the device")
    parser.add_argument("--out", type=Path, default=Path(".sluice/gpu-check"), help="directory of the results")
    chosen = parser.parse_args()
    if chosen.dry and os.environ.get("TRITON_INTERPRET") != "1":
        # How kernels run is settled when they are loaded, which was above.
        command = [sys.executable, "-m", "bench.gpu_check", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "TRITON_INTERPRET": "1"})  # noqa: S606
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    if not chosen.dry and not torch.cuda.is_available():
        print("no CUDA device that torch can use; --dry exercises everything but the device", file=sys.stderr)
        return 2
    check = DRY if chosen.dry else WET
    started = time.monotonic()
    have_tests_passed = run_tests(check, _LIMIT_S / 2)
    with tempfile.TemporaryDirectory(prefix="sluice-gpu-check-") as directory:
        results = results_of(check, load(check, Path(directory)), have_tests_passed=have_tests_passed)
    seconds = time.monotonic() - started
    chosen.out.mkdir(parents=True, exist_ok=True)
    path = chosen.out / ("dry.json" if chosen.dry else "results.json")
    path.write_text(json.dumps({**results, "seconds": seconds}, indent=2) + "\n")
    print(f"tests {'passed' if have_tests_passed else 'FAILED'}, {seconds:.0f} s of {_LIMIT_S}, {path}")
    return 0 if have_tests_passed and seconds < _LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
