"""Compiles the CPU kernels: `python -m gpu_worker.kernels.build`. Used by the wheel's build hook, so it imports only the
standard library.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DIRECTORY = Path(__file__).parent
LIBRARY = DIRECTORY / "cpu_kernels.so"

# No -march=native: a wheel runs on other machines than the one that made it. No -ffast-math and no contraction: the order
# of operations is the contract of these kernels.
FLAGS = (
    "-std=c++17", "-O3", "-mavx2", "-mfma", "-mf16c", "-fopenmp", "-ffp-contract=off", "-fno-exceptions", "-fno-rtti",
    "-fvisibility=hidden", "-fPIC", "-Wall", "-Wextra",
)  # fmt: skip


class CompileError(Exception):
    """There is no library, and why."""


def source_hash() -> str:
    """Names the sources and flags that a library was built from."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted((*_sources(), *DIRECTORY.glob("*.h"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def compile_library(target: Path = LIBRARY, *, defines: tuple[str, ...] = ()) -> Path:
    """Builds `target`, which appears whole or not at all. Raises CompileError.

    Linked without -fopenmp, so that OpenMP's own library stays to be found at load: torch brings one, and a process with
    two would have two pools of threads.
    """
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform != "linux":
        raise CompileError(f"the kernels are for Linux on x86-64, this is {sys.platform} on {platform.machine()}")
    compiler = _find_compiler()
    macros = [f"-D{define}" for define in (f'SLUICE_SOURCE_HASH="{source_hash()}"', *defines)]
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as building:
        objects = [Path(building) / f"{source.stem}.o" for source in _sources()]
        for source, compiled in zip(_sources(), objects, strict=True):
            _run([*compiler, *FLAGS, *macros, "-c", str(source), "-o", str(compiled)])
        linked = Path(building) / target.name
        _run([*compiler, "-shared", "-Wl,--as-needed", *map(str, objects), "-o", str(linked)])
        linked.replace(target)
    return target


def _sources() -> list[Path]:
    return sorted(DIRECTORY.glob("*.cpp"))


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - the build's own compiler
    except OSError as error:
        raise CompileError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        raise CompileError(f"{command[0]} failed: {done.stderr.strip()[-2000:]}")


def _find_compiler() -> list[str]:
    """$CXX, which may carry arguments, or the first known compiler on the path."""
    if configured := os.environ.get("CXX"):
        return shlex.split(configured)
    for name in ("g++", "c++", "clang++"):
        if found := shutil.which(name):
            return [found]
    raise CompileError("no C++ compiler: neither g++, c++ nor clang++ is on the path, and CXX is not set")


def main() -> None:
    try:
        line = f"built {compile_library()}"
    except CompileError as error:
        line = f"CPU kernels not built, the slower torch code will be used: {error}"
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
