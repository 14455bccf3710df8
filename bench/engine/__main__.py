"""How fast the engine is: `python -m bench.engine` (or `make bench-engine`).

The engine alone, the engine through gRPC with the whole local stack, and the peers that the file named by
SLUICE_BENCH_PEERS tells of, each in a process of its own, taking turns in rounds: the machine's speed changes, and only what
was measured in one round is compared. Writes the tables to docs/performance.md when asked.
"""

import argparse
import os
import platform
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.engine.contestants import PEERS_VARIABLE, Contestant, own, read_peers
from bench.engine.tables import ratio, ratio_table, replace_between, speed_table
from bench.engine.workload import WORKLOADS, Workload
from service_kit.model_manifest import read_manifest

DEFAULT_MODEL = Path(".sluice/models/smollm2-135m-instruct")
_BOUND = ("32", "64")
_PAGE = Path("docs/performance.md")


def contestants(arguments: argparse.Namespace) -> list[Contestant]:
    """Ours, bounds included, and the peers."""
    found: list[Contestant] = []
    for model in arguments.model:
        precision = read_manifest(model).precision
        found.append(own("alone", f"engine alone, {precision}", model, arguments.kv_dtype))
        found.append(own("bound", f"bound, {precision}", model, arguments.kv_dtype, _BOUND))
        if not arguments.without_grpc:
            found.append(
                own("through_grpc", f"through gRPC, {precision}", model, arguments.kv_dtype, ("32", "64", "one"))
            )
    peers = os.environ.get(PEERS_VARIABLE)
    return found + (read_peers(Path(peers)) if peers else [])


def scaled(workload: Workload, tokens: int | None) -> Workload:
    """With so many tokens at most in and out, to try the benchmark out."""
    if tokens is None:
        return workload
    return Workload(
        requests=workload.requests,
        prompt_tokens=min(workload.prompt_tokens, tokens),
        output_tokens=min(workload.output_tokens, tokens),
    )


def measure(
    arguments: argparse.Namespace, taking_part: list[Contestant]
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Rounds in which everybody runs every workload once; each round begins with another one."""
    results: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for number in range(arguments.pairs):
        first = number % len(taking_part)
        for name in arguments.only:
            for contestant in (*taking_part[first:], *taking_part[:first]):
                if contestant.takes(name):
                    result = contestant.run(scaled(WORKLOADS[name], arguments.tokens))
                    results[contestant.name, name].append(result)
                    shown = {key: value for key, value in result.items() if isinstance(value, float)}
                    print(f"round {number + 1}, {name}, {contestant.name}: {shown}", flush=True)
    return results


def bound_lines(results: dict[tuple[str, str], list[dict[str, Any]]], precisions: list[str]) -> Iterator[str]:
    """Decode steps against what they cannot be faster than."""
    yield "| decode step | requests | step / bound | step, ms | bound, ms | fastest products, ms | KV, ms |"
    yield "|---" * 7 + "|"
    for precision in precisions:
        for name in _BOUND:
            steps, bounds = (
                results.get((f"engine alone, {precision}", name)),
                results.get((f"bound, {precision}", name)),
            )
            if not steps or not bounds:
                continue
            speeds = {
                ("bound", name): [bound["bound_ms"] for bound in bounds],
                ("step", name): [step["step_ms"] for step in steps],
            }
            products = statistics.median(min(bound["products_ms"].values()) for bound in bounds)
            figures = [statistics.median(speeds["step", name]), statistics.median(speeds["bound", name]), products]
            figures.append(statistics.median(bound["kv_ms"] for bound in bounds))
            compared = ratio(speeds, ("step", name), ("bound", name))
            yield f"| {precision} | {name} | {compared} | {' | '.join(f'{figure:.1f}' for figure in figures)} |"


def report(arguments: argparse.Namespace, results: dict[tuple[str, str], list[dict[str, Any]]]) -> list[str]:
    speeds = {
        key: [1 / each["wall_s"] if key[1] == "prompt" else each["output_tokens_per_s"] for each in found]
        for key, found in results.items()
        if not key[0].startswith("bound")
    }
    names = list(dict.fromkeys(name for name, _ in speeds))
    ours = [name for name in names if name.startswith(("engine alone", "through gRPC"))]
    precisions = [read_manifest(model).precision for model in arguments.model]
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, {arguments.kv_dtype} KV"
    lines = [
        f"{machine}, {arguments.pairs} rounds; ratios are medians of the rounds' ratios (least to most).",
        "",
        *speed_table(speeds, names, arguments.only),
    ]
    for peer in (name for name in names if name not in ours):
        lines += ["", *ratio_table(speeds, ours, peer, arguments.only)]
        if naive := [ratio(speeds, (name, "64"), (peer, "naive")) for name in ours if (peer, "naive") in speeds]:
            lines += ["", f"64 at once against {peer}, one after the other: {', '.join(map(str, naive))}"]
    for precision in precisions:
        through = ratio(speeds, (f"through gRPC, {precision}", "32"), (f"engine alone, {precision}", "32"))
        if through:
            lines += ["", f"{precision}, 32 requests, through gRPC / alone: {through}"]
    return [*lines, "", *bound_lines(results, precisions)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    int8 = DEFAULT_MODEL.with_name(f"{DEFAULT_MODEL.name}-int8")
    parser.add_argument("--model", type=Path, nargs="+", default=[DEFAULT_MODEL, int8], help="model directories")
    parser.add_argument("--kv-dtype", default="float32")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--tokens", type=int, help="at most so many in and out, to try it out")
    parser.add_argument("--without-grpc", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"write the tables to {_PAGE}")
    arguments = parser.parse_args()
    lines = report(arguments, measure(arguments, contestants(arguments)))
    print("\n" + "\n".join(lines))
    if arguments.write:
        _PAGE.write_text(replace_between(_PAGE.read_text(), lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
