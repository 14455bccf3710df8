"""Rounds in which every contestant runs once, each round beginning with another one: the machine's speed changes, and only what
was measured in one round is compared."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from bench.engine.contestants import Contestant, Running
from bench.engine.workload import Workload

Samples = dict[tuple[str, str], list[dict[str, Any]]]
"""What each contestant said of each workload, a result per round."""

Entry = tuple[Contestant, str]
"""A contestant and the name of the workload that it runs."""


def measure(
    entries: Sequence[Entry], workloads: Mapping[str, Workload], num_rounds: int
) -> tuple[Samples, dict[str, str]]:
    """Results, and why those that broke off did. All processes stay until the end; what broke off is left out from then on."""
    samples: Samples = defaultdict(list)
    broken: dict[str, str] = {}
    with ExitStack() as stack:
        running: list[tuple[Running, str]] = []
        for contestant, workload in entries:
            try:
                running.append((stack.enter_context(contestant.started(workloads[workload])), workload))
            except RuntimeError as error:
                broken[f"{contestant.name}, {workload}"] = str(error)
        for number in range(num_rounds):
            first = number % max(1, len(running))
            for process, workload in (*running[first:], *running[:first]):
                key = f"{process.name}, {workload}"
                if key in broken:
                    continue
                try:
                    result = process.run()
                except RuntimeError as error:
                    broken[key] = str(error)
                    continue
                samples[process.name, workload].append(result)
                shown = ", ".join(f"{name} {value:.4g}" for name, value in result.items() if isinstance(value, float))
                print(f"round {number + 1}: {key}: {shown}", flush=True)
    return samples, broken


def series(samples: Samples, name: str, workload: str, field: str) -> list[float]:
    """One number of each round's result; not every contestant gives each."""
    return [float(result[field]) for result in samples.get((name, workload), ()) if field in result]


def best_of(columns: Sequence[Sequence[float]]) -> list[float]:
    """The largest of each round, of those that were measured at all."""
    return [max(row) for row in zip(*(column for column in columns if column), strict=False)]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=False)]


def describe(pairs: Sequence[float]) -> str:
    """The median, the least and the most."""
    return f"{statistics.median(pairs):.2f} ({min(pairs):.2f} to {max(pairs):.2f})"
