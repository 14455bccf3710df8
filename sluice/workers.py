"""Worker sessions as an operator sees them."""

from collections.abc import Mapping
from datetime import datetime

from service_kit.ids import SessionId
from sluice.listing import Value
from state_store.model import SessionRecord, SessionState

COLUMNS = (
    "worker",
    "session_id",
    "state",
    "model",
    "revision",
    "precision",
    "address",
    "scheduler",
    "owner_epoch",
    "lease_s",
    "running",
    "max_running",
    "blocks",
    "block_size",
    "context_length",
)
SHOWN = ("worker", "session_id", "state", "model", "scheduler", "owner_epoch", "lease_s", "running", "max_running")


def session_fields(session: SessionRecord, running: Mapping[SessionId, int], now: datetime) -> dict[str, Value]:
    """All COLUMNS. `lease_s`: seconds until the lease of a live session ends; negative when that was missed."""
    is_live = session.state is SessionState.LIVE
    return {
        "worker": session.worker_id,
        "session_id": session.session_id,
        "state": session.state.value,
        "model": session.model,
        "revision": session.model_key.revision,
        "precision": session.model_key.precision,
        "address": session.address,
        "scheduler": session.scheduler_id,
        "owner_epoch": session.owner_epoch,
        "lease_s": round((session.lease_expires_at - now).total_seconds(), 1) if is_live else None,
        "running": running.get(session.session_id, 0),
        "max_running": session.max_running,
        "blocks": session.num_blocks,
        "block_size": session.block_size,
        "context_length": session.context_length,
    }
