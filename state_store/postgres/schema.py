"""The tables, as SQLAlchemy metadata: what the migrations must amount to (`alembic check`).

`generations`, `attempts` and `chunks` are partitioned by generation id: it is a UUIDv7, so one key is unique over all
partitions and prunes by time (partitions.py). The CHECKs repeat state_store/transitions.py; a wrong write fails here.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    ForeignKey,
    Identity,
    Index,
    Integer,
    Interval,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, UUID
from sqlalchemy.schema import SchemaItem

metadata = MetaData(
    naming_convention={
        "ix": "%(table_name)s_%(column_0_N_name)s_idx",
        "uq": "%(table_name)s_%(column_0_N_name)s_key",
        "ck": "%(table_name)s_%(constraint_name)s_check",
        "fk": "%(table_name)s_%(column_0_N_name)s_fkey",
        "pk": "%(table_name)s_pkey",
    }
)

PARTITIONED_TABLES = ("generations", "attempts", "chunks")
_BY_ID = "RANGE (generation_id)"
_LIVE = "state IN ('QUEUED', 'RUNNING')"
_CLASSES = "('INTERACTIVE', 'STANDARD', 'BATCH')"
_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrent", "tokens_per_day", "tokens_per_month")
_FINAL_STATES = "('SUCCEEDED', 'FAILED', 'CANCELLED', 'EXPIRED')"


def _time(name: str, *, nullable: bool = False) -> Column[object]:
    return Column(name, DateTime(timezone=True), nullable=nullable)


def _generation_id(name: str = "generation_id", *, nullable: bool = False) -> Column[object]:
    return Column(name, UUID(as_uuid=True), nullable=nullable)


def _limits() -> list[SchemaItem]:
    """Columns and their check: the same for a tenant and for a key."""
    columns = [Column(name, BigInteger, comment="null: unlimited") for name in _LIMITS]
    return [*columns, CheckConstraint(" AND ".join(f"{name} >= 1" for name in _LIMITS), name="limits")]


generations = Table(
    "generations",
    metadata,
    _generation_id(),
    Column("tenant_id", Text, nullable=False),
    Column("key_id", Text, nullable=False),
    Column("request_id", Text, nullable=False),
    Column("requeue_of", UUID(as_uuid=True)),
    Column("model", Text, nullable=False),
    Column("model_revision", Text, nullable=False),
    Column("model_precision", Text, nullable=False),
    Column("priority_class", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("attempt", Integer, nullable=False, server_default=text("0")),
    Column("charged_attempts", Integer, nullable=False, server_default=text("0")),
    Column("session_id", Text),
    Column("nonce", BigInteger, nullable=False, server_default=text("0"), comment="unsigned, as two's complement"),
    Column("prompt_token_ids", LargeBinary, nullable=False, comment="little-endian uint32 each"),
    Column("sampling", JSONB, nullable=False),
    Column("grace", Interval, comment="null is unlimited"),
    Column("traceparent", Text, nullable=False),
    Column("cancel_cause", Text),
    _time("created_at"),
    _time("queued_at"),
    _time("queue_deadline_at"),
    _time("deadline_at", nullable=True),
    _time("started_at", nullable=True),
    _time("finished_at", nullable=True),
    Column("finish_reason", Text),
    Column("error_reason", Text),
    Column("error_message", Text),
    Column("matched_stop", Text),
    Column("cached_prompt_tokens", BigInteger, nullable=False, server_default=text("0")),
    Column("output_tokens", BigInteger, nullable=False, server_default=text("0")),
    Column("is_stored", Boolean, nullable=False, server_default=text("true"), comment="false: texts go after the end"),
    _time("texts_deleted_at", nullable=True),
    Column("deleted_prompt_tokens", BigInteger, nullable=False, server_default=text("0")),
    PrimaryKeyConstraint("generation_id"),
    CheckConstraint(f"state IN ('QUEUED', 'RUNNING', {_FINAL_STATES[1:]}", name="state"),
    CheckConstraint("(state = 'RUNNING') = (session_id IS NOT NULL)", name="session_while_running"),
    CheckConstraint(f"({_LIVE}) = (finished_at IS NULL)", name="finished_when_final"),
    CheckConstraint(
        f"NOT ({_LIVE}) OR (finish_reason IS NULL AND error_reason IS NULL AND error_message IS NULL"
        " AND matched_stop IS NULL AND output_tokens = 0 AND cached_prompt_tokens = 0)",
        name="no_end_while_live",
    ),
    CheckConstraint("finish_reason IN ('STOP', 'LENGTH', 'CANCELLED')", name="finish_reason"),
    CheckConstraint("attempt BETWEEN 0 AND 20 AND (attempt >= 1 OR state <> 'RUNNING')", name="attempt"),
    CheckConstraint("(attempt = 0) = (started_at IS NULL)", name="started_with_first_attempt"),
    CheckConstraint("charged_attempts BETWEEN 0 AND attempt", name="charged_attempts"),
    CheckConstraint("output_tokens >= 0", name="output_tokens"),
    CheckConstraint("cancel_cause IN ('CLIENT', 'GRACE', 'QUEUE_TIMEOUT', 'DEADLINE')", name="cancel_cause"),
    CheckConstraint(f"priority_class IN {_CLASSES}", name="priority_class"),
    Index("generations_queued_idx", "generation_id", postgresql_where=text("state = 'QUEUED'")),
    Index(
        "generations_queued_to_end_idx",
        "generation_id",
        postgresql_where=text(
            "state = 'QUEUED' AND (cancel_cause IS NOT NULL OR charged_attempts >= 3 OR attempt >= 20)"
        ),
    ),
    Index(
        "generations_queue_deadline_idx",
        "queue_deadline_at",
        postgresql_where=text("state = 'QUEUED' AND attempt = 0 AND cancel_cause IS NULL"),
    ),
    Index(
        "generations_deadline_idx",
        "deadline_at",
        postgresql_where=text(f"{_LIVE} AND cancel_cause IS NULL AND deadline_at IS NOT NULL"),
    ),
    Index("generations_running_idx", "session_id", "generation_id", postgresql_where=text("state = 'RUNNING'")),
    Index(
        "generations_grace_idx",
        "generation_id",
        postgresql_where=text(f"{_LIVE} AND cancel_cause IS NULL AND grace IS NOT NULL"),
    ),
    Index("generations_tenant_idx", "tenant_id", "generation_id"),
    Index(
        "generations_unstored_idx",
        "generation_id",
        postgresql_where=text("NOT is_stored AND texts_deleted_at IS NULL"),
    ),
    postgresql_partition_by=_BY_ID,
)

attempts = Table(
    "attempts",
    metadata,
    _generation_id(),
    Column("attempt", Integer, nullable=False),
    Column("session_id", Text, nullable=False),
    Column("worker_id", Text, nullable=False),
    Column("nonce", BigInteger, nullable=False, comment="unsigned, as two's complement"),
    _time("granted_at"),
    _time("ended_at", nullable=True),
    Column("outcome", Text, comment="null: not ended, or requeued and not yet looked into"),
    Column("end_position", BigInteger),
    Column("is_charged", Boolean, nullable=False, server_default=text("false")),
    PrimaryKeyConstraint("generation_id", "attempt"),
    CheckConstraint("attempt BETWEEN 1 AND 20", name="attempt"),
    CheckConstraint("outcome IN ('FINISHED', 'SESSION_LOST', 'ASSIGNMENT_LOST', 'HANDED_BACK')", name="outcome"),
    CheckConstraint("outcome IS NULL OR ended_at IS NOT NULL", name="outcome_when_ended"),
    CheckConstraint("(outcome IS NULL) = (end_position IS NULL)", name="position_with_outcome"),
    CheckConstraint("NOT is_charged OR outcome IS NOT NULL", name="charged_when_ended"),
    Index("attempts_one_open_idx", "generation_id", unique=True, postgresql_where=text("ended_at IS NULL")),
    postgresql_partition_by=_BY_ID,
)

chunks = Table(
    "chunks",
    metadata,
    _generation_id(),
    Column("first_number", BigInteger, nullable=False),
    Column("last_number", BigInteger, nullable=False),
    Column("token_ids", LargeBinary, nullable=False, comment="little-endian uint32 each"),
    Column("text", LargeBinary, nullable=False, comment="UTF-8; a bytea because an output may contain NUL"),
    Column("text_ends", ARRAY(Integer), nullable=False, comment="where in `text` each token's text ends"),
    Column("prev_chain", BigInteger, nullable=False, comment="unsigned, as two's complement"),
    Column("chain", BigInteger, nullable=False, comment="unsigned, as two's complement"),
    Column("logprobs", LargeBinary, comment="msgpack, one array per token; null: not asked for"),
    PrimaryKeyConstraint("generation_id", "first_number"),
    CheckConstraint("first_number >= 1 AND last_number >= first_number", name="numbers"),
    CheckConstraint(
        "octet_length(token_ids) = 4 * (last_number - first_number + 1)"
        " AND cardinality(text_ends) = last_number - first_number + 1",
        name="one_text_per_token",
    ),
    postgresql_partition_by=_BY_ID,
)

request_keys = Table(
    "request_keys",
    metadata,
    Column("tenant_id", Text(collation="C"), nullable=False),
    Column("request_id", Text(collation="C"), nullable=False),
    _generation_id(),
    Column("request_hash", LargeBinary, nullable=False),
    _time("expires_at", nullable=True),
    PrimaryKeyConstraint("tenant_id", "request_id"),
    Index("request_keys_expires_at_idx", "expires_at", postgresql_where=text("expires_at IS NOT NULL")),
)

worker_sessions = Table(
    "worker_sessions",
    metadata,
    Column("session_id", Text(collation="C"), nullable=False),
    Column("worker_id", Text, nullable=False),
    Column("address", Text, nullable=False),
    Column("scheduler_id", Text, nullable=False),
    Column("owner_epoch", BigInteger, nullable=False),
    Column("state", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("model_revision", Text, nullable=False),
    Column("model_precision", Text, nullable=False),
    Column("context_length", BigInteger, nullable=False),
    Column("num_blocks", BigInteger, nullable=False),
    Column("block_size", BigInteger, nullable=False),
    Column("max_running", BigInteger, nullable=False),
    _time("lease_expires_at"),
    Column("kv_dtype", Text, nullable=False, server_default=text("''")),
    PrimaryKeyConstraint("session_id"),
    CheckConstraint("state IN ('LIVE', 'LOST', 'ENDED')", name="state"),
    CheckConstraint("owner_epoch >= 1", name="owner_epoch"),
    Index("worker_sessions_lease_idx", "lease_expires_at", postgresql_where=text("state = 'LIVE'")),
)

tenants = Table(
    "tenants",
    metadata,
    Column("tenant_id", Text(collation="C"), nullable=False),
    Column("name", Text, nullable=False),
    Column("weight", Double, nullable=False),
    Column("max_class", Text, nullable=False),
    _time("disabled_at", nullable=True),
    Column("allowed_models", ARRAY(Text), comment="null: all"),
    *_limits(),
    PrimaryKeyConstraint("tenant_id"),
    CheckConstraint("weight BETWEEN 0.001 AND 1000", name="weight"),
    CheckConstraint(f"max_class IN {_CLASSES}", name="max_class"),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("key_id", Text(collation="C"), nullable=False),
    Column("tenant_id", Text, ForeignKey("tenants.tenant_id"), nullable=False),
    Column("prefix", Text, nullable=False),
    Column("key_hash", LargeBinary, nullable=False),
    Column("is_admin", Boolean, nullable=False, server_default=text("false")),
    _time("created_at"),
    _time("expires_at", nullable=True),
    _time("revoked_at", nullable=True),
    Column("name", Text, nullable=False, server_default=text("''")),
    *_limits(),
    PrimaryKeyConstraint("key_id"),
    UniqueConstraint("prefix"),
    Index("api_keys_created_at_idx", "created_at", "key_id"),
    Index("api_keys_tenant_idx", "tenant_id", "created_at", "key_id"),
)

admin_audit = Table(
    "admin_audit",
    metadata,
    Column("audit_id", BigInteger, Identity(always=True), nullable=False),
    _time("at"),
    Column("actor", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("details", JSONB, nullable=False),
    PrimaryKeyConstraint("audit_id"),
    CheckConstraint("jsonb_typeof(details) = 'object'", name="details"),
    Index("admin_audit_target_idx", "target", "audit_id"),
)

usage_ledger = Table(
    "usage_ledger",
    metadata,
    _generation_id(),
    Column("tenant_id", Text, nullable=False),
    Column("key_id", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("priority_class", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_prompt_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    _time("finished_at"),
    PrimaryKeyConstraint("generation_id"),
    CheckConstraint(f"state IN {_FINAL_STATES}", name="state"),
    Index("usage_ledger_tenant_idx", "tenant_id", "finished_at"),
    Index("usage_ledger_finished_at_idx", "finished_at"),
)

dead_letters = Table(
    "dead_letters",
    metadata,
    _generation_id(),
    Column("tenant_id", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("message", Text, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("worker_ids", ARRAY(Text), nullable=False),
    _time("created_at"),
    PrimaryKeyConstraint("generation_id"),
    Index("dead_letters_created_at_idx", "created_at", "generation_id"),
)
