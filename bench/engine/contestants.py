"""Who takes part: ours, and peers in virtual environments of their own. Each is a process that loads once for a workload and
then runs it when it is asked to, so that all take turns with everything warm.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bench.engine.workload import Workload

PEERS_VARIABLE = "SLUICE_BENCH_PEERS"
_CLOSE_S = 30
_LLAMA_TYPES = ("Q4_0", "Q8_0")
_LLAMA_PROMPT_TYPES = ("F16", *_LLAMA_TYPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A command that takes a workload's sizes as options and prints a line of JSON for each line that it reads."""

    name: str
    command: tuple[str, ...]

    @contextmanager
    def started(self, workload: Workload) -> Iterator["Running"]:
        """The process, loaded and warmed up. Raises RuntimeError with the end of what the command said."""
        sizes = {name: getattr(workload, name) for name in ("requests", "prompt_tokens", "output_tokens")}
        options = [part for name, size in sizes.items() for part in (f"--{name.replace('_', '-')}", str(size))]
        with (
            tempfile.TemporaryFile("w+", errors="replace") as said,
            subprocess.Popen(  # noqa: S603 - what the user named
                [*self.command, *options, "--waits"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            ) as process,
        ):
            running = Running(self.name, process, said)
            try:
                running.read()
                yield running
            finally:
                _close(process)


class Running:
    """A contestant's process."""

    def __init__(self, name: str, process: subprocess.Popen[str], said: IO[str]) -> None:
        self.name = name
        self._process = process
        self._said = said

    def run(self) -> dict[str, Any]:
        """One run of the workload. Raises RuntimeError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("run\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._end() from None
        return self.read()

    def read(self) -> dict[str, Any]:
        """The JSON of the next line that is an object; what else is printed is passed over. Raises RuntimeError."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                result: dict[str, Any] = json.loads(line)
                return result
        raise self._end()

    def _end(self) -> RuntimeError:
        """How the process ended."""
        status = self._process.wait(_CLOSE_S)
        self._said.seek(0)
        return RuntimeError(f"{self.name}: exit status {status}: {self._said.read().strip()[-2000:]}")


def _close(process: subprocess.Popen[str]) -> None:
    """No more lines: the process goes by itself, or is killed."""
    assert process.stdin is not None
    try:
        process.stdin.close()
        process.wait(_CLOSE_S)
    except (BrokenPipeError, subprocess.TimeoutExpired):
        process.kill()


def own(module: str, name: str, model: Path, kv_dtype: str) -> Contestant:
    """One of this package's commands."""
    command = (sys.executable, "-m", f"bench.engine.{module}", "--model", str(model), "--kv-dtype", kv_dtype)
    return Contestant(name=name, command=command)


class Peers:
    """What stands in a directory: vllm/ and llama/, virtual environments with vLLM (and transformers) and llama-cpp-python,
    and model.gguf, the same model for llama.cpp. What is missing does not take part; None: nothing is there."""

    def __init__(self, directory: Path | None, model: Path) -> None:
        """`model` holds the weights that vLLM and transformers read. Raises ValueError for a directory without any peer."""
        self._directory = directory
        self._model = model
        if directory is not None and not (self.vllm() or self.llama(_LLAMA_TYPES)):
            raise ValueError(f"{PEERS_VARIABLE}={directory}: neither vllm/bin/python nor llama/bin/python is there")

    def vllm(self) -> list[Contestant]:
        return self._make("vLLM", "vllm", "run_vllm", self._model)

    def transformers(self) -> list[Contestant]:
        return self._make("transformers", "vllm", "run_transformers", self._model)

    def llama(self, kinds: Sequence[str] = _LLAMA_TYPES) -> list[Contestant]:
        file = self._directory / "model.gguf" if self._directory is not None else None
        if file is None or not file.exists():
            return []
        return [
            contestant
            for kind in kinds
            for contestant in self._make(f"llama.cpp {kind}", "llama", "run_llama", file, "--make", kind)
        ]

    def llama_for_prompts(self) -> list[Contestant]:
        return self.llama(_LLAMA_PROMPT_TYPES)

    def _make(self, name: str, environment: str, module: str, model: Path, *more: str) -> list[Contestant]:
        python = self._directory / environment / "bin" / "python" if self._directory is not None else None
        if python is None or not python.exists():
            return []
        command = (
            str(python.absolute()),
            "-m",
            f"bench.engine.peers.{module}",
            "--model",
            str(model.absolute()),
            *more,
        )
        return [Contestant(name=name, command=command)]
