"""How fairly and safely tenants share the service: `python -m bench.fairness` (or `make bench-fairness`).

The whole service as OS processes with the simulated engine, on real Postgres and Valkey. Every figure is printed with its
limit; the exit status is 1 when one misses.
"""

import sys

from bench.fairness.bad_keys import bad_keys
from bench.fairness.large_head import large_head
from bench.fairness.latency import interactive, light
from bench.fairness.limits import limits
from bench.fairness.overload import overload
from bench.fairness.routing import routing
from bench.fairness.shares import idle, shares, weights
from bench.groups import Group, main

GROUPS: dict[str, Group] = {
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

if __name__ == "__main__":
    sys.exit(main(GROUPS, description=__doc__))
