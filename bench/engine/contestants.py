"""Who takes part: commands that run one workload and end with a line of JSON. Peers are told by a file."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.engine.workload import Workload

PEERS_VARIABLE = "SLUICE_BENCH_PEERS"
_TIMEOUT_S = 1200


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """`command` may hold {requests}, {prompt_tokens} and {output_tokens}. `workloads`: names, none for all."""

    name: str
    command: tuple[str, ...]
    is_peer: bool
    workloads: tuple[str, ...] = ()

    def takes(self, workload: str) -> bool:
        return workload in self.workloads if self.workloads else workload != "naive"

    def run(self, workload: Workload) -> dict[str, Any]:
        """The JSON of the last line. Raises RuntimeError with the end of what the command said."""
        command = [_fill(part, workload) for part in self.command]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)  # noqa: S603
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode != 0 or not lines:
            raise RuntimeError(f"{self.name}: exit status {done.returncode}: {(done.stderr or done.stdout)[-2000:]}")
        result: dict[str, Any] = json.loads(lines[-1])
        return result


def _fill(part: str, workload: Workload) -> str:
    for name in ("requests", "prompt_tokens", "output_tokens"):
        part = part.replace(f"{{{name}}}", str(getattr(workload, name)))
    return part


def own(module: str, name: str, model: Path, kv_dtype: str, workloads: tuple[str, ...] = ()) -> Contestant:
    """One of this package's commands."""
    sizes = ("--requests", "{requests}", "--prompt-tokens", "{prompt_tokens}", "--output-tokens", "{output_tokens}")
    command = (sys.executable, "-m", f"bench.engine.{module}", "--model", str(model), "--kv-dtype", kv_dtype, *sizes)
    return Contestant(name=name, command=command, is_peer=False, workloads=workloads)


def read_peers(path: Path) -> list[Contestant]:
    """From JSON: {"name": {"command": ["/path/python", "run.py", "--requests", "{requests}", ...], "workloads": [...]}}.

    A peer takes part in all workloads but "naive" unless its own are named. Raises ValueError that names what is wrong.
    """
    peers = json.loads(path.read_text())
    if not isinstance(peers, Mapping):
        raise ValueError(f"{path}: not an object of peers by name")  # noqa: TRY004 - the file is wrong, not a caller
    found = []
    for name, peer in peers.items():
        command = peer.get("command") if isinstance(peer, Mapping) else None
        if not isinstance(command, list) or not all(isinstance(part, str) for part in command) or not command:
            raise ValueError(f"{path}: {name}.command is not a list of strings")
        workloads = tuple(peer.get("workloads", ()))
        found.append(Contestant(name=name, command=tuple(command), is_peer=True, workloads=workloads))
    return found
