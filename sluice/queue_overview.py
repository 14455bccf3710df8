"""The admission queue as an operator sees it: what the index holds, beside what the record says is queued."""

from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

from scheduler.queue.port import AdmissionQueue, QueueDepth
from sluice.listing import Value
from state_store.model import ModelKey, PriorityClass
from state_store.overview_store import OverviewStore, QueuedRows
from state_store.ports import SessionStore

COLUMNS = (
    "model",
    "revision",
    "precision",
    "class",
    "queued",
    "prompt_tokens",
    "delayed",
    "in_flight",
    "tenants",
    "committed",
    "oldest_s",
)
SHOWN = ("model", "class", "queued", "prompt_tokens", "delayed", "in_flight", "tenants", "committed", "oldest_s")
ALL_CLASSES = "all"

Row = dict[str, Value]


class Store(OverviewStore, SessionStore, Protocol):
    """What this needs of the truth."""


async def read_queue(store: Store, queue: AdmissionQueue, *, model: str | None, now: datetime) -> list[Row]:
    """A row for each model, and one for each of its classes that has something.

    `queued` counts the index in Redis, `committed` the rows in Postgres; they differ by what was committed or granted just
    now. `oldest_s` is the longest wait, from the rows.
    """
    committed = await store.queued_rows()
    names = {row.model_key: row.model for row in committed}
    keys = {*names, *await queue.model_keys()}
    if keys - names.keys():
        sessions = await store.list_sessions(include_over=True)
        names = {session.model_key: session.model for session in sessions} | names
    rows: list[Row] = []
    for key in sorted(keys, key=lambda key: (names.get(key, ""), key.revision, key.precision)):
        name = names.get(key)
        if model in (None, name):
            own = [row for row in committed if row.model_key == key]
            rows += _rows_of(name, key, await queue.depth(key), own, now)
    return rows


def _rows_of(
    name: str | None, key: ModelKey, depth: QueueDepth, committed: Sequence[QueuedRows], now: datetime
) -> list[Row]:
    start: Row = dict.fromkeys(COLUMNS) | {"model": name, "revision": key.revision, "precision": key.precision}
    total = start | {
        "class": ALL_CLASSES,
        "queued": depth.num_queued,
        "prompt_tokens": sum(depth.prompt_tokens),
        "delayed": depth.delayed,
        "in_flight": depth.in_flight,
        "tenants": depth.num_tenants,
        **_committed(committed, now),
    }
    by_class = [
        start
        | {
            "class": each.value,
            "queued": depth.requests[each.rank],
            "prompt_tokens": depth.prompt_tokens[each.rank],
            **_committed([row for row in committed if row.priority_class is each], now),
        }
        for each in PriorityClass
    ]
    return [total, *(row for row in by_class if row["queued"] or row["committed"])]


def _committed(rows: Sequence[QueuedRows], now: datetime) -> Row:
    waits = [(now - row.oldest_at).total_seconds() for row in rows]
    return {"committed": sum(row.count for row in rows), "oldest_s": round(max(waits), 1) if waits else None}
