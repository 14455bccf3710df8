"""Runs groups of figures by name and reports them: the command line of the benchmarks on the whole local stack."""

import argparse
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor

from bench.fairness.arena import Plan
from bench.figures import Figure, report

Group = Callable[[Plan], Sequence[Figure]]
"""A function of a module, so that another process can be told which."""


def main(groups: Mapping[str, Group], *, description: str | None) -> int:
    """Measures what the command line names; the exit status is 1 when a figure misses its limit."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--only", nargs="+", choices=list(groups), default=list(groups), help="groups of figures")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="of all durations; the limits are meant for 1")
    arguments = parser.parse_args()
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # it tells of every process that is started beside a connection
    load = os.getloadavg()[0]
    print(f"seed {arguments.seed}, scale {arguments.scale:g}, load average before: {load:.1f}", flush=True)
    chosen = {name: groups[name] for name in arguments.only}
    return report(_measure(chosen, Plan(seed=arguments.seed, scale=arguments.scale)))


def _measure(groups: Mapping[str, Group], plan: Plan) -> Iterator[Figure]:
    """Each group in a process of its own, because gRPC serves one event loop in a process."""
    for name, group in groups.items():
        started_s = time.monotonic()
        with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as process:
            yield from process.submit(_measure_group, name, group, plan).result()
        print(f"       ({name}: {time.monotonic() - started_s:.0f} s)", flush=True)


def _measure_group(name: str, group: Group, plan: Plan) -> Sequence[Figure]:
    """A group that breaks off is a missed figure."""
    try:
        return group(plan)
    except Exception as error:  # noqa: BLE001 - told, and counted as missed
        traceback.print_exception(error)
        return [Figure(name=f"{name}: broke off", value=1, at_most=0, note=type(error).__name__)]
