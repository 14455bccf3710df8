"""The groups of figures, by name."""

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from bench.fairness.arena import Plan
from bench.fairness.bad_keys import bad_keys
from bench.fairness.large_head import large_head
from bench.fairness.latency import interactive, light
from bench.fairness.limits import limits
from bench.fairness.overload import overload
from bench.fairness.routing import routing
from bench.fairness.shares import idle, shares, weights
from bench.figures import Figure

GROUPS: dict[str, Callable[[Plan], Sequence[Figure]]] = {
    "shares": shares,
    "weights": weights,
    "light": light,
    "interactive": interactive,
    "idle": idle,
    "overload": overload,
    "limits": limits,
    "routing": routing,
    "large-head": large_head,
    "bad-keys": bad_keys,
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
