"""The hot statements of the store with parameters, for looking at how they are executed."""

from datetime import UTC, datetime, timedelta
from typing import Any

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

HOT: dict[str, tuple[str, dict[str, Any]]] = {
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
    "ended": (retention.ENDED, IDS),
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

BY_ID = (
    "submit",
    "grant",
    "finish",
    "record_attempt_ends",
    "get",
    "lock_generations",
    "requeue",
    "request_cancel",
    "stored_ends",
    "read_output",
    "quota_records",
    "ended",
    "delete_texts",
)
"""Those that name the ids they are about: they are planned for no other day than the ids'."""
