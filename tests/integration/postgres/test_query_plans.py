"""Hot statements must find their rows by index, whatever else the tables hold."""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from service_kit.ids import new_generation_id
from state_store.model import Finish, State
from state_store.postgres import finish, overview, quota_use, reads, retention, statements, submit
from tests.support.generations import new_generation

ID = new_generation_id()
IDS = {"generation_ids": [ID]}
NAMES = {"tenant_ids": ["t"], "request_ids": ["r"]}
PAGE = {"after": reads._LOWEST_ID, "limit": 100}
END = Finish(generation_id=ID, from_state=State.RUNNING, attempt=1, state=State.SUCCEEDED, output=None, output_tokens=0)
NOW = {"now": datetime.now(UTC)}

HOT = {
    "submit": (statements.SUBMIT, submit._columns([new_generation()]) | NOW),
    "grant": (
        statements.GRANT,
        IDS | NOW | {"after_attempts": [0], "session_ids": ["s"], "worker_ids": ["w"], "nonces": [1]},
    ),
    "finish": (statements.FINISH, finish._finish_columns([END], NOW["now"])),
    "record_attempt_ends": (
        statements.RECORD_ATTEMPT_ENDS,
        IDS | NOW | {"attempts": [1], "outcomes": ["FINISHED"], "end_positions": [1], "charges": [True]},
    ),
    "get": (statements.GET, IDS),
    "find_by_request_ids": (statements.FIND_BY_REQUEST_IDS, NAMES | NOW),
    "lock_sessions": (statements.LOCK_SESSIONS_FOR_GRANT, {"session_ids": ["s"]}),
    "lock_generations": (statements.LOCK_GENERATIONS, IDS),
    "lock_running": (statements.LOCK_RUNNING_OF_SESSIONS, {"session_ids": ["s"]}),
    "lock_request_keys": (statements.LOCK_REQUEST_KEYS, NAMES),
    "requeue": (statements.REQUEUE, IDS | NOW),
    "request_cancel": (statements.REQUEST_CANCEL, IDS | {"causes": ["CLIENT"]}),
    "stored_ends": (statements.STORED_ENDS, IDS),
    "read_output": (statements.READ_OUTPUT, IDS),
    "list_page": (
        statements.LIST_PAGE,
        {"tenant_id": "t", "all_states": True, "states": [], "before": reads._HIGHEST_ID, "limit": 50},
    ),
    "queued_page": (statements.QUEUED_PAGE, PAGE | NOW | {"min_age": timedelta(seconds=2)}),
    "overdue_page": (statements.OVERDUE_PAGE, PAGE | NOW),
    "queued_to_end_page": (statements.QUEUED_TO_END_PAGE, PAGE),
    "grace_page": (statements.GRACE_PAGE, PAGE),
    "running_of": (statements.RUNNING_SUMMARIES, {"session_ids": ["s"]}),
    "quota_records": (quota_use._RECORDS, IDS),
    "live_charges_page": (quota_use._LIVE_PAGE, PAGE),
    "quota_use_now": (
        quota_use._NOW,
        {"minute": ID, "day": ID, "month": ID, "settled_before": NOW["now"]},
    ),
    "prune": (reads._PRUNE_REQUEST_KEYS, NOW | {"limit": 100}),
    "unstored_page": (retention.UNSTORED_PAGE, PAGE | NOW | {"kept": timedelta(seconds=15)}),
    "delete_texts": (retention.DELETE_TEXTS, IDS | NOW),
    "running_by_session": (overview.RUNNING_BY_SESSION, {}),
    "queued_rows": (overview.QUEUED_ROWS, {}),
    "find_generations": (
        statements.FIND_GENERATIONS,
        {
            "since": reads._LOWEST_ID,
            "tenant_id": None,
            "all_states": True,
            "states": [],
            "model": None,
            "priority_class": None,
            "limit": 50,
        },
    ),
}


def nodes(plan: dict) -> list[dict]:
    return [plan, *(node for child in plan.get("Plans", []) for node in nodes(child))]


@pytest.fixture(scope="module")
def filled_dsn(make_store_dsn: Callable[[], str]) -> str:
    """20,000 ended generations of today with keys, attempts and chunks, and statistics."""
    dsn = make_store_dsn()
    with psycopg.connect(dsn) as connection:
        connection.execute(
            "CREATE TEMP TABLE ids AS SELECT uuidv7(make_interval(secs => -0.001 * (i % 1000))) AS id, i"
            " FROM generate_series(1, 20000) i"
        )
        connection.execute(
            "INSERT INTO generations (generation_id, tenant_id, key_id, request_id, model, model_revision,"
            " model_precision, priority_class, state, attempt, started_at, prompt_token_ids, sampling, traceparent,"
            " created_at, queued_at, queue_deadline_at, finished_at)"
            " SELECT id, 't' || i % 50, 'k', 'r' || i, 'm', '1', 'fp32', 'BATCH', 'CANCELLED', 1, now(), '', '{}', '',"
            " now(), now(), now(), now() FROM ids"
        )
        connection.execute(
            "INSERT INTO attempts SELECT id, 1, 's', 'w', 0, now(), now(), 'FINISHED', 1, false FROM ids"
        )
        connection.execute("INSERT INTO chunks SELECT id, 1, 1, '\\x00000000', '', '{0}', 0, 0 FROM ids")
        connection.execute("INSERT INTO request_keys SELECT 't' || i % 50, 'r' || i, id, '', now() FROM ids")
        connection.execute(
            "INSERT INTO worker_sessions SELECT 's' || i, 'w', 'a', 'x', 1, 'LOST', 'm', '1', 'fp32', 1, 1, 1, 1, now()"
            " FROM generate_series(1, 2000) i"
        )
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")
    return dsn


def scans(dsn: str, statement: str, parameters: dict[str, Any]) -> list[str]:
    """The filled tables that the plan of the statement reads as a whole."""
    with psycopg.connect(dsn) as connection:
        row = connection.execute(f"EXPLAIN (FORMAT JSON) {statement}", parameters).fetchone()
    assert row is not None
    filled = re.compile(rf"^((generations|attempts|chunks)_p{datetime.now(UTC):%Y%m%d}|request_keys|worker_sessions)$")
    return [
        node["Relation Name"]
        for node in nodes(row[0][0]["Plan"])
        if node["Node Type"] == "Seq Scan" and filled.match(node["Relation Name"])
    ]


@pytest.mark.parametrize("name", HOT)
def test_no_hot_statement_scans_a_filled_table(filled_dsn: str, name: str) -> None:
    assert scans(filled_dsn, *HOT[name]) == []


def test_the_guard_sees_a_scan(filled_dsn: str) -> None:
    assert scans(filled_dsn, "SELECT * FROM generations WHERE model = %(model)s", {"model": "m"}) != []
