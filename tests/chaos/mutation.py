"""`python -m tests.chaos.mutation`: does the harness notice? Plants faults in a private copy of the tree, one at a time, and
expects the trials there to fail. Exit code 0 when every planted fault was found."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.oracle import Kind
from tests.chaos.plan import FaultKind

_ROOT = Path(__file__).parents[2]
_COPIED = (
    "service_kit",
    "state_store",
    "migrations",
    "gateway",
    "scheduler",
    "gpu_worker",
    "sluice",
    "protos",
    "tests",
    "alembic.ini",
    "pyproject.toml",
)
_FOUND = 1
"""Exit code of a run whose checks failed."""


class PlantError(Exception):
    """The text that a planted fault replaces is not there (once)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    path: str
    old: str
    new: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A fault to plant, the interleaving that shows it, and what the oracle must call it."""

    name: str
    replacements: tuple[Replacement, ...]
    kinds: tuple[FaultKind, ...]
    expected: frozenset[Kind]


MUTATIONS = (
    Mutation(
        name="append without the attempt check",
        replacements=(
            Replacement(path="state_store/delta_log/lua/append.lua", old=" or log.attempt > attempt", new=""),
            Replacement(path="state_store/delta_log/lua/append.lua", old="log.attempt < attempt", new="false"),
        ),
        kinds=(FaultKind.LATE_APPEND,),
        expected=frozenset({Kind.MISMATCH, Kind.GAP, Kind.DUPLICATE, Kind.DATA_LOSS}),
    ),
    Mutation(
        name="grant without the session's lock and epoch",
        replacements=(
            Replacement(
                path="state_store/postgres/statements.py",
                old="WHERE session_id = ANY(%(session_ids)s::text[]) ORDER BY session_id FOR SHARE",
                new="WHERE session_id = ANY(%(session_ids)s::text[]) ORDER BY session_id",
            ),
            Replacement(path="state_store/decisions.py", old=" or session.owner_epoch != request.owner_epoch", new=""),
        ),
        kinds=(FaultKind.DEPOSED_GRANT,),
        expected=frozenset({Kind.FOREIGN_GRANT}),
    ),
)


def copy_tree(target: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in _COPIED:
        source = _ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=ignored)
        else:
            shutil.copy2(source, target / name)


def plant(tree: Path, mutation: Mutation) -> None:
    """Raises PlantError when the code has changed so that the fault has no place any more."""
    for replacement in mutation.replacements:
        path = tree / replacement.path
        text = path.read_text()
        if text.count(replacement.old) != 1:
            raise PlantError(f"{replacement.path} has {text.count(replacement.old)} times {replacement.old!r}")
        path.write_text(text.replace(replacement.old, replacement.new))


def is_caught(mutation: Mutation | None, *, trials: int, seed: int, out: Path) -> bool:
    """Runs trials in a copy with the fault planted; None plants nothing, and nothing may be found."""
    with tempfile.TemporaryDirectory(prefix="sluice-mutation-") as temporary:
        tree = Path(temporary)
        tree.chmod(0o755)
        copy_tree(tree)
        kinds = mutation.kinds if mutation is not None else tuple(kind for each in MUTATIONS for kind in each.kinds)
        if mutation is not None:
            plant(tree, mutation)
        environment = {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'protos' / 'gen'}"}
        options = ["--trials", str(trials), "--seed", str(seed), "--only", *kinds, "--stop-at-first", "--out", str(out)]
        command = [sys.executable, "-m", "tests.chaos", *options]
        code = subprocess.run(command, cwd=tree, env=environment, check=False).returncode
    if mutation is None:
        return code == _FOUND
    return code == _FOUND and bool(mutation.expected & _found_kinds(out))


def _found_kinds(out: Path) -> set[Kind]:
    findings = json.loads((out / "result.json").read_text())["findings"]
    return {Kind(name) for name, number in findings.items() if number}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.mutation")
    parser.add_argument("--trials", type=int, default=50, help="most trials for each planted fault")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/chaos-mutation"))
    parser.add_argument("--control", type=int, default=0, help="first so many trials without a fault, which must pass")
    parsed = parser.parse_args(arguments)
    out: Path = parsed.out.absolute()
    verdicts: dict[str, bool] = {}
    if parsed.control:
        print("-- nothing planted", flush=True)
        verdicts["nothing planted, nothing found"] = not is_caught(
            None, trials=parsed.control, seed=parsed.seed, out=out / "control"
        )
    for number, mutation in enumerate(MUTATIONS, start=1):
        print(f"-- planted: {mutation.name}", flush=True)
        directory = out / str(number)
        verdicts[f"found: {mutation.name}"] = is_caught(mutation, trials=parsed.trials, seed=parsed.seed, out=directory)
    for name, is_good in verdicts.items():
        print(f"{'yes' if is_good else 'NO':<5}{name}")
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
