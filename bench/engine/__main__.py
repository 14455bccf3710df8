"""How fast the engine is: `python -m bench.engine` (or `make bench-engine`). Exit status 1 when a figure misses its limit.

The engine alone, the engine through gRPC with the whole local stack, and the peers in the directory that SLUICE_BENCH_PEERS
names, each in a process of its own, take turns in rounds. `--only` runs single groups; `--write` puts the tables into
docs/performance.md.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.engine.contestants import PEERS_VARIABLE, Contestant, Peers, own
from bench.engine.limits import PRECISIONS, figures, quality_figures, service_figures
from bench.engine.rounds import Entry, Samples, measure
from bench.engine.tables import bound_table, figure_table, replace_between, speed_table
from bench.engine.workload import WORKLOADS, Workload
from bench.figures import Figure
from service_kit.model_manifest import read_manifest
from sluice.home import find_home
from sluice.models.evaluate import evaluate

DEFAULT_MODEL = Path(".sluice/models/smollm2-135m-instruct")
KV_DTYPES = {"fp32": "float32", "int8": "float16"}
_PAGE = Path("docs/performance.md")
_TIMED = ("32", "64", "one", "prompt")
_GROUPS = (*_TIMED, "service", "quality")
_ROUNDS = {"64": 3}
_USUAL_ROUNDS = 5


@dataclass(kw_only=True)
class Results:
    """All that was measured."""

    samples: Samples = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)


class Bench:
    """Who takes part in what."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._models = dict(zip(PRECISIONS, arguments.model, strict=True))
        for precision, model in self._models.items():
            found = read_manifest(model).precision
            if (found == "int8") != (precision == "int8"):
                raise ValueError(f"{model}: precision {found}, where {precision} is expected")
        directory = os.environ.get(PEERS_VARIABLE)
        self._peers = Peers(Path(directory) if directory else None, self._models["fp32"])
        self._arguments = arguments

    def entries(self, group: str) -> list[Entry]:
        """The contestants of a group, each with its workload."""
        peers = self._peers
        taking_part = [*self._own("alone")]
        taking_part += peers.llama_for_prompts() if group == "prompt" else peers.llama()
        if group in {"32", "64"}:
            # For single requests vLLM, which takes a minute to start, has no limit to keep.
            taking_part += [*self._own("bound"), *peers.vllm()]
        if group == "32" and not self._arguments.without_grpc:
            taking_part += self._own("through_grpc", "through gRPC")
        naive = [(contestant, "naive") for contestant in peers.transformers()] if group == "64" else []
        return [*((contestant, group) for contestant in taking_part), *naive]

    def run(self, group: str, results: Results) -> None:
        if group == "service":
            results.figures += self._service()
        elif group == "quality":
            results.figures += self._quality()
        else:
            num_rounds = self._arguments.pairs or _ROUNDS.get(group, _USUAL_ROUNDS)
            workloads = {name: _scaled(workload, self._arguments.tokens) for name, workload in WORKLOADS.items()}
            samples, broken = measure(self.entries(group), workloads, num_rounds)
            results.samples.update(samples)
            results.broken.update(broken)

    def _own(self, module: str, title: str | None = None) -> list[Contestant]:
        return [
            own(module, f"{title or module} {precision}", model, KV_DTYPES[precision])
            for precision, model in self._models.items()
        ]

    def _service(self) -> Iterator[Figure]:
        seconds = str(self._arguments.service_seconds)
        command = [sys.executable, "-m", "bench.engine.service_process", "--seconds", seconds]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own module
        if done.returncode != 0:
            raise RuntimeError(done.stderr[-2000:])
        return service_figures(json.loads(done.stdout.splitlines()[-1]))

    def _quality(self) -> Iterator[Figure]:
        perplexity = {}
        for precision, model in self._models.items():
            (found,) = evaluate(find_home(), [model.name], kv_dtypes=(KV_DTYPES[precision],))
            perplexity[precision] = found.perplexity
        return quality_figures(perplexity["fp32"], perplexity["int8"], kv_dtype=KV_DTYPES["int8"])


def _scaled(workload: Workload, tokens: int | None) -> Workload:
    """With so many tokens at most in and out, to try the benchmark out."""
    if tokens is None:
        return workload
    return Workload(
        requests=workload.requests,
        prompt_tokens=min(workload.prompt_tokens, tokens),
        output_tokens=min(workload.output_tokens, tokens),
    )


def page_lines(results: Results, groups: Sequence[str]) -> list[str]:
    """What --write puts into the page."""
    kv = ", ".join(f"{precision} with {dtype} KV" for precision, dtype in KV_DTYPES.items())
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}; {kv}."
    lines = [f"{machine} Ratios are medians of the rounds' ratios, with the least and the most of them."]
    workloads = [name for name in (*_TIMED, "naive") if any(work == name for _, work in results.samples)]
    if workloads:
        lines += ["", *speed_table(results.samples, workloads)]
    if bounds := bound_table(results.samples, PRECISIONS):
        lines += ["", *bounds]
    lines += ["", *figure_table(results.figures)]
    lines += [f"\n{name} broke off." for name in results.broken]
    left_out = [name for name in _GROUPS if name not in groups]
    return [*lines, f"\nNot measured in this run: {', '.join(left_out)}."] if left_out else lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    int8 = DEFAULT_MODEL.with_name(f"{DEFAULT_MODEL.name}-int8")
    parser.add_argument("--model", type=Path, nargs=2, default=[DEFAULT_MODEL, int8], help="directories: fp32, int8")
    parser.add_argument("--only", nargs="+", choices=_GROUPS, default=list(_GROUPS), help="groups of figures")
    parser.add_argument(
        "--pairs", type=int, help=f"rounds; {_USUAL_ROUNDS} by default, with 64 requests {_ROUNDS['64']}"
    )
    parser.add_argument("--tokens", type=int, help="at most so many in and out, to try it out")
    parser.add_argument("--service-seconds", type=float, default=60.0)
    parser.add_argument("--without-grpc", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"write the tables to {_PAGE}")
    arguments = parser.parse_args()
    bench, results = Bench(arguments), Results()
    print(f"load average before: {os.getloadavg()[0]:.1f}", flush=True)
    for group in arguments.only:
        started_s = time.monotonic()
        bench.run(group, results)
        print(f"({group}: {time.monotonic() - started_s:.0f} s)", flush=True)
    results.figures[:0] = figures(results.samples)
    lines = page_lines(results, arguments.only)
    print("\n" + "\n".join(lines) + "\n")
    for name, reason in results.broken.items():
        print(f"{name} broke off: {reason}")
    num_missed = sum(not figure.is_kept for figure in results.figures)
    for figure in results.figures:
        print(figure)
    print(f"{num_missed} limits missed" if num_missed else "all limits kept")
    if arguments.write:
        _PAGE.write_text(replace_between(_PAGE.read_text(), lines))
    return 1 if num_missed or results.broken else 0


if __name__ == "__main__":
    sys.exit(main())
