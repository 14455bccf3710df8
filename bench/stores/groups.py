"""The groups of figures, by name."""

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from bench.fairness.arena import Plan
from bench.figures import Figure
from bench.stores.outages import postgres_killed, postgres_stopped, redis_emptied
from bench.stores.reconnects import reconnects
from bench.stores.slow_reader import slow_reader

GROUPS: dict[str, Callable[[Plan], Sequence[Figure]]] = {
    "postgres-stopped": postgres_stopped,
    "postgres-killed": postgres_killed,
    "redis-emptied": redis_emptied,
    "slow-reader": slow_reader,
    "reconnects": reconnects,
}


def measure(names: Sequence[str], plan: Plan) -> Iterator[Figure]:
    """Each group in a process of its own, because gRPC serves one event loop in a process."""
    for name in names:
        started_s = time.monotonic()
        with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as process:
            yield from process.submit(_measure_group, name, plan).result()
        print(f"       ({name}: {time.monotonic() - started_s:.0f} s)", flush=True)


def _measure_group(name: str, plan: Plan) -> Sequence[Figure]:
    """A group that breaks off is a missed figure."""
    try:
        return GROUPS[name](plan)
    except Exception as error:  # noqa: BLE001 - told, and counted as missed
        traceback.print_exception(error)
        return [Figure(name=f"{name}: broke off", value=1, at_most=0, note=type(error).__name__)]
