"""What many rows cost: whether hot statements keep their plans, and how long dropping a day takes and gets in the way.

The rows are made by the server itself (generate_series) on a Postgres of its own, without fsync. While days are dropped, a
reader and a writer go on; the longest that one of their statements took is what a client could notice.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import psycopg

from bench.figures import Figure, percentile, report
from sluice.local.postgres import LocalPostgres
from state_store.postgres.migrate import upgrade
from state_store.postgres.partitions import drop_partitions
from tests.support.filled_tables import DAY, Plans, add_day, fill, partitions_of
from tests.support.hot_statements import HOT

NUM_DAYS = 30
OLD_AGES, SMALL = (32, 33), 1000
"""Days that retention drops; the first has half of all rows."""


@contextmanager
def postgres() -> Iterator[LocalPostgres]:
    directory = Path(tempfile.mkdtemp(prefix="sluice-retention-"))
    directory.chmod(0o711)
    try:
        with LocalPostgres(directory / "postgres", fsync=False) as server:
            yield server
            server.kill()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class Traffic:
    """A reader and a writer of today's rows, until stopped. `slowest_s` of the statements since the last `reset`."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._stop = threading.Event()
        self._took_s: list[float] = []
        self._threads = [
            threading.Thread(target=self._repeat, args=(name,)) for name in ("queued_page", "request_cancel")
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def took_during(self, seconds: float) -> list[float]:
        self._took_s.clear()
        self._stop.wait(seconds)
        return list(self._took_s)

    def reset(self) -> None:
        self._took_s.clear()

    @property
    def slowest_s(self) -> float:
        return max(self._took_s, default=0.0)

    def _repeat(self, name: str) -> None:
        statement, parameters = HOT[name]
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            while not self._stop.is_set():
                started = time.perf_counter()
                connection.execute(statement, parameters)
                self._took_s.append(time.perf_counter() - started)


def plans_kept(dsn: str, now: datetime) -> Iterator[Figure]:
    """Statements that read a filled table as a whole, planned afresh and after many uses."""
    filled = {"request_keys", "worker_sessions"}
    for age in range(NUM_DAYS):
        filled |= partitions_of(now - age * DAY)
    for num_uses, name in ((0, "planned afresh"), (8, "after many uses")):
        plans = Plans(dsn, num_uses=num_uses)
        bad = [name for name, (statement, values) in HOT.items() if plans.scanned(statement, values, sorted(filled))]
        yield Figure(
            name=f"hot statements that scan a table, {name} (of {len(HOT)})",
            value=len(bad),
            at_most=0,
            note=", ".join(bad),
        )


def drops(dsn: str, now: datetime, rows: int) -> Iterator[Figure]:
    """One old day after the other, under traffic."""
    with Traffic(dsn) as traffic:
        quiet = traffic.took_during(2)
        yield Figure(name="statement of the traffic, median, s", value=statistics.median(quiet))
        yield Figure(name="statement of the traffic, p99, s", value=percentile(quiet, 0.99))
        for age in reversed(OLD_AGES):
            traffic.reset()
            started = time.perf_counter()
            num_rounds, slowest_s = 0, 0.0
            while partitions_of(now - age * DAY) & _present(dsn):
                done = drop_partitions(dsn, now, kept=(age - 1) * DAY)
                slowest_s = max(slowest_s, done.slowest_drop.total_seconds())
                num_rounds += 1
            took = time.perf_counter() - started
            size = f"{rows if age == OLD_AGES[0] else SMALL} rows"
            yield Figure(
                name="purge of one partition (the slowest of a day), s", value=slowest_s, at_most=1.0, note=size
            )
            yield Figure(
                name="purge of that day, checks and three tables, s", value=took, note=f"{num_rounds} round(s)"
            )
            yield Figure(name="slowest statement of the traffic meanwhile, s", value=traffic.slowest_s, at_most=0.5)


def _present(dsn: str) -> set[str]:
    with psycopg.connect(dsn) as connection:
        found = connection.execute("SELECT relname FROM pg_class WHERE relkind = 'r'").fetchall()
    return {str(name) for (name,) in found}


def measure(rows: int) -> Iterator[Figure]:
    now = datetime.now(UTC)
    with postgres() as server:
        dsn = server.create_database("retention")
        upgrade(dsn)
        started = time.perf_counter()
        per_day = max(1, rows // 2 // NUM_DAYS)
        old = rows - per_day * NUM_DAYS
        fill(dsn, now=now, rows_by_age=dict.fromkeys(range(NUM_DAYS), per_day), num_days=OLD_AGES[-1])
        add_day(dsn, now - OLD_AGES[0] * DAY, old, with_keys=False)
        add_day(dsn, now - OLD_AGES[-1] * DAY, SMALL, with_keys=False)
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(
                "VACUUM ANALYZE"
            )  # else autovacuum holds the old day, and its drop waits for that to end
        yield Figure(name="rows of generations, attempts and chunks each", value=rows)
        yield Figure(name="filling, s", value=time.perf_counter() - started)
        yield from plans_kept(dsn, now)
        yield from drops(dsn, now, old)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000, help="of generations; as many attempts and chunks")
    return report(measure(parser.parse_args().rows))


if __name__ == "__main__":
    sys.exit(main())
