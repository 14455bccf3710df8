"""`sluice status`: how the local stack is."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
import typer

from sluice.console import write_text
from sluice.home import find_home
from sluice.local.health import Health, check_health
from sluice.run_file import decode_tls, read_run_file

_WORK = "SELECT state, count(*) FROM generations WHERE state IN ('QUEUED', 'RUNNING') GROUP BY state"
_SESSIONS = (
    "SELECT worker_id, model, scheduler_id, owner_epoch FROM worker_sessions WHERE state = 'LIVE' ORDER BY worker_id"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatus:
    """What the durable record says. `sessions` are (worker, model, scheduler, owner epoch)."""

    queued: int
    running: int
    sessions: tuple[tuple[str, str, str, int], ...]


def status_command() -> None:
    """Health of each service, worker sessions, and work that waits or runs. Exit code 1 unless all is well."""
    run = read_run_file(find_home().run_file)
    services: Any = run["services"]
    postgres: Any = run["postgres"]
    health = {
        name: check_health(entry["address"], tls=decode_tls(entry.get("tls"))) for name, entry in services.items()
    }
    store = read_store(str(postgres["dsn"]))
    for line in render_status(services, health, store):
        write_text(f"{line}\n")
    if store is None or any(state is not Health.SERVING for state in health.values()):
        raise typer.Exit(1)


def render_status(
    services: Mapping[str, Mapping[str, Any]], health: Mapping[str, Health], store: StoreStatus | None
) -> list[str]:
    lines = [
        f"{name:<14} {health[name].value:<12} {entry['address']:<22} pid {entry['pid']}"
        for name, entry in services.items()
    ]
    if store is None:
        return [*lines, f"{'postgres':<14} {Health.UNREACHABLE.value}"]
    lines.append(f"{'postgres':<14} {Health.SERVING.value:<12} {store.queued} queued, {store.running} running")
    lines += [
        f"session        worker {worker}, model {model}, owned by {scheduler} (epoch {epoch})"
        for worker, model, scheduler, epoch in store.sessions
    ]
    return lines if store.sessions else [*lines, "session        none: requests wait in the queue"]


def read_store(dsn: str) -> StoreStatus | None:
    """None when Postgres cannot be reached."""
    try:
        with psycopg.connect(dsn, connect_timeout=2) as connection:
            counts: dict[str, int] = dict(connection.execute(_WORK).fetchall())
            sessions = connection.execute(_SESSIONS).fetchall()
    except psycopg.OperationalError:
        return None
    return StoreStatus(
        queued=int(counts.get("QUEUED", 0)),
        running=int(counts.get("RUNNING", 0)),
        sessions=tuple((str(row[0]), str(row[1]), str(row[2]), int(row[3])) for row in sessions),
    )
