"""What stores that fail and slow readers cost, and what many requests leave: `python -m bench.stores` (`make bench-stores`).

The whole service as OS processes with the simulated engine, on real Postgres and Valkey. Every figure is printed with its
limit; the exit status is 1 when one misses.
"""

import sys

from bench.groups import Group, main
from bench.stores.outages import postgres_killed, postgres_stopped, redis_emptied
from bench.stores.reconnects import reconnects
from bench.stores.retention import retention
from bench.stores.slow_reader import slow_reader

GROUPS: dict[str, Group] = {
    "postgres-stopped": postgres_stopped,
    "postgres-killed": postgres_killed,
    "redis-emptied": redis_emptied,
    "slow-reader": slow_reader,
    "reconnects": reconnects,
    "retention": retention,
}

if __name__ == "__main__":
    sys.exit(main(GROUPS, description=__doc__))
