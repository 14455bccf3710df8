"""What stores that fail and readers that are slow cost: `python -m bench.stores` (or `make bench-stores`).

The whole service as OS processes with the simulated engine, on real Postgres and Valkey. Every figure is printed with its
limit; the exit status is 1 when one misses.
"""

import argparse
import os
import sys

from bench.fairness.arena import Plan
from bench.figures import report
from bench.stores.groups import GROUPS, measure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), default=list(GROUPS), help="groups of figures")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="of all durations; the limits are meant for 1")
    arguments = parser.parse_args()
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # it tells of every process that is started beside a connection
    load = os.getloadavg()[0]
    print(f"seed {arguments.seed}, scale {arguments.scale:g}, load average before: {load:.1f}", flush=True)
    return report(measure(arguments.only, Plan(seed=arguments.seed, scale=arguments.scale)))


if __name__ == "__main__":
    sys.exit(main())
