"""The generations with their attempts and output, sessions, tenants and keys, usage and dead letters.

Dropping a partitioned table drops its partitions.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "attempts",
        sa.Column("generation_id", sa.UUID(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("worker_id", sa.Text(), nullable=False),
        sa.Column("nonce", sa.BigInteger(), nullable=False, comment="unsigned, as two's complement"),
        sa.Column("granted_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True, comment="null: not ended, or requeued and not yet looked into"),
        sa.Column("end_position", sa.BigInteger(), nullable=True),
        sa.Column("is_charged", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.CheckConstraint(
            "outcome IN ('FINISHED', 'SESSION_LOST', 'ASSIGNMENT_LOST', 'HANDED_BACK')",
            name=op.f("attempts_outcome_check"),
        ),
        sa.CheckConstraint(
            "(outcome IS NULL) = (end_position IS NULL)", name=op.f("attempts_position_with_outcome_check")
        ),
        sa.CheckConstraint("NOT is_charged OR outcome IS NOT NULL", name=op.f("attempts_charged_when_ended_check")),
        sa.CheckConstraint("attempt BETWEEN 1 AND 20", name=op.f("attempts_attempt_check")),
        sa.CheckConstraint("outcome IS NULL OR ended_at IS NOT NULL", name=op.f("attempts_outcome_when_ended_check")),
        sa.PrimaryKeyConstraint("generation_id", "attempt", name=op.f("attempts_pkey")),
        postgresql_partition_by="RANGE (generation_id)",
    )
    op.create_index(
        "attempts_one_open_idx",
        "attempts",
        ["generation_id"],
        unique=True,
        postgresql_where=sa.text("ended_at IS NULL"),
    )
    op.create_table(
        "chunks",
        sa.Column("generation_id", sa.UUID(), nullable=False),
        sa.Column("first_number", sa.BigInteger(), nullable=False),
        sa.Column("last_number", sa.BigInteger(), nullable=False),
        sa.Column("token_ids", sa.LargeBinary(), nullable=False, comment="little-endian uint32 each"),
        sa.Column("text", sa.LargeBinary(), nullable=False, comment="UTF-8; a bytea because an output may contain NUL"),
        sa.Column(
            "text_ends",
            postgresql.ARRAY(sa.Integer()),
            nullable=False,
            comment="where in `text` each token's text ends",
        ),
        sa.Column("prev_chain", sa.BigInteger(), nullable=False, comment="unsigned, as two's complement"),
        sa.Column("chain", sa.BigInteger(), nullable=False, comment="unsigned, as two's complement"),
        sa.CheckConstraint("first_number >= 1 AND last_number >= first_number", name=op.f("chunks_numbers_check")),
        sa.CheckConstraint(
            "octet_length(token_ids) = 4 * (last_number - first_number + 1) AND cardinality(text_ends) = last_number - first_number + 1",
            name=op.f("chunks_one_text_per_token_check"),
        ),
        sa.PrimaryKeyConstraint("generation_id", "first_number", name=op.f("chunks_pkey")),
        postgresql_partition_by="RANGE (generation_id)",
    )
    op.create_table(
        "dead_letters",
        sa.Column("generation_id", sa.UUID(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("worker_ids", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("generation_id", name=op.f("dead_letters_pkey")),
    )
    op.create_index("dead_letters_created_at_idx", "dead_letters", ["created_at", "generation_id"], unique=False)
    op.create_table(
        "generations",
        sa.Column("generation_id", sa.UUID(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("requeue_of", sa.UUID(), nullable=True),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("model_revision", sa.Text(), nullable=False),
        sa.Column("model_precision", sa.Text(), nullable=False),
        sa.Column("priority_class", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("charged_attempts", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=True),
        sa.Column(
            "nonce",
            sa.BigInteger(),
            server_default=sa.text("0"),
            nullable=False,
            comment="unsigned, as two's complement",
        ),
        sa.Column("prompt_token_ids", sa.LargeBinary(), nullable=False, comment="little-endian uint32 each"),
        sa.Column("sampling", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("grace", sa.Interval(), nullable=True, comment="null is unlimited"),
        sa.Column("traceparent", sa.Text(), nullable=False),
        sa.Column("cancel_cause", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("queued_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("queue_deadline_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("deadline_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("error_reason", sa.Text(), nullable=True),
        sa.Column("error_message", sa.Text(), nullable=True),
        sa.Column("matched_stop", sa.Text(), nullable=True),
        sa.Column("cached_prompt_tokens", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.CheckConstraint(
            "(state = 'RUNNING') = (session_id IS NOT NULL)", name=op.f("generations_session_while_running_check")
        ),
        sa.CheckConstraint(
            "(state IN ('QUEUED', 'RUNNING')) = (finished_at IS NULL)",
            name=op.f("generations_finished_when_final_check"),
        ),
        sa.CheckConstraint(
            "NOT (state IN ('QUEUED', 'RUNNING')) OR (finish_reason IS NULL AND error_reason IS NULL AND error_message IS NULL AND matched_stop IS NULL AND output_tokens = 0 AND cached_prompt_tokens = 0)",
            name=op.f("generations_no_end_while_live_check"),
        ),
        sa.CheckConstraint(
            "attempt BETWEEN 0 AND 20 AND (attempt >= 1 OR state <> 'RUNNING')", name=op.f("generations_attempt_check")
        ),
        sa.CheckConstraint(
            "cancel_cause IN ('CLIENT', 'GRACE', 'QUEUE_TIMEOUT', 'DEADLINE')",
            name=op.f("generations_cancel_cause_check"),
        ),
        sa.CheckConstraint(
            "finish_reason IN ('STOP', 'LENGTH', 'CANCELLED')", name=op.f("generations_finish_reason_check")
        ),
        sa.CheckConstraint(
            "priority_class IN ('INTERACTIVE', 'STANDARD', 'BATCH')", name=op.f("generations_priority_class_check")
        ),
        sa.CheckConstraint(
            "state IN ('QUEUED', 'RUNNING', 'SUCCEEDED', 'FAILED', 'CANCELLED', 'EXPIRED')",
            name=op.f("generations_state_check"),
        ),
        sa.CheckConstraint(
            "(attempt = 0) = (started_at IS NULL)", name=op.f("generations_started_with_first_attempt_check")
        ),
        sa.CheckConstraint("charged_attempts BETWEEN 0 AND attempt", name=op.f("generations_charged_attempts_check")),
        sa.CheckConstraint("output_tokens >= 0", name=op.f("generations_output_tokens_check")),
        sa.PrimaryKeyConstraint("generation_id", name=op.f("generations_pkey")),
        postgresql_partition_by="RANGE (generation_id)",
    )
    op.create_index(
        "generations_deadline_idx",
        "generations",
        ["deadline_at"],
        unique=False,
        postgresql_where=sa.text("state IN ('QUEUED', 'RUNNING') AND cancel_cause IS NULL AND deadline_at IS NOT NULL"),
    )
    op.create_index(
        "generations_grace_idx",
        "generations",
        ["generation_id"],
        unique=False,
        postgresql_where=sa.text("state IN ('QUEUED', 'RUNNING') AND cancel_cause IS NULL AND grace IS NOT NULL"),
    )
    op.create_index(
        "generations_queue_deadline_idx",
        "generations",
        ["queue_deadline_at"],
        unique=False,
        postgresql_where=sa.text("state = 'QUEUED' AND attempt = 0 AND cancel_cause IS NULL"),
    )
    op.create_index(
        "generations_queued_idx",
        "generations",
        ["generation_id"],
        unique=False,
        postgresql_where=sa.text("state = 'QUEUED'"),
    )
    op.create_index(
        "generations_queued_to_end_idx",
        "generations",
        ["generation_id"],
        unique=False,
        postgresql_where=sa.text(
            "state = 'QUEUED' AND (cancel_cause IS NOT NULL OR charged_attempts >= 3 OR attempt >= 20)"
        ),
    )
    op.create_index(
        "generations_running_idx",
        "generations",
        ["session_id", "generation_id"],
        unique=False,
        postgresql_where=sa.text("state = 'RUNNING'"),
    )
    op.create_index("generations_tenant_idx", "generations", ["tenant_id", "generation_id"], unique=False)
    op.create_table(
        "request_keys",
        sa.Column("tenant_id", sa.Text(collation="C"), nullable=False),
        sa.Column("request_id", sa.Text(collation="C"), nullable=False),
        sa.Column("generation_id", sa.UUID(), nullable=False),
        sa.Column("request_hash", sa.LargeBinary(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("tenant_id", "request_id", name=op.f("request_keys_pkey")),
    )
    op.create_index(
        "request_keys_expires_at_idx",
        "request_keys",
        ["expires_at"],
        unique=False,
        postgresql_where=sa.text("expires_at IS NOT NULL"),
    )
    op.create_table(
        "tenants",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("max_class", sa.Text(), nullable=False),
        sa.Column("disabled_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("max_class IN ('INTERACTIVE', 'STANDARD', 'BATCH')", name=op.f("tenants_max_class_check")),
        sa.CheckConstraint("weight > 0", name=op.f("tenants_weight_check")),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("tenants_pkey")),
    )
    op.create_table(
        "usage_ledger",
        sa.Column("generation_id", sa.UUID(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("priority_class", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "state IN ('SUCCEEDED', 'FAILED', 'CANCELLED', 'EXPIRED')", name=op.f("usage_ledger_state_check")
        ),
        sa.PrimaryKeyConstraint("generation_id", name=op.f("usage_ledger_pkey")),
    )
    op.create_index("usage_ledger_tenant_idx", "usage_ledger", ["tenant_id", "finished_at"], unique=False)
    op.create_table(
        "worker_sessions",
        sa.Column("session_id", sa.Text(collation="C"), nullable=False),
        sa.Column("worker_id", sa.Text(), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("scheduler_id", sa.Text(), nullable=False),
        sa.Column("owner_epoch", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("model_revision", sa.Text(), nullable=False),
        sa.Column("model_precision", sa.Text(), nullable=False),
        sa.Column("context_length", sa.BigInteger(), nullable=False),
        sa.Column("num_blocks", sa.BigInteger(), nullable=False),
        sa.Column("block_size", sa.BigInteger(), nullable=False),
        sa.Column("max_running", sa.BigInteger(), nullable=False),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("state IN ('LIVE', 'LOST', 'ENDED')", name=op.f("worker_sessions_state_check")),
        sa.CheckConstraint("owner_epoch >= 1", name=op.f("worker_sessions_owner_epoch_check")),
        sa.PrimaryKeyConstraint("session_id", name=op.f("worker_sessions_pkey")),
    )
    op.create_index(
        "worker_sessions_lease_idx",
        "worker_sessions",
        ["lease_expires_at"],
        unique=False,
        postgresql_where=sa.text("state = 'LIVE'"),
    )
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("prefix", sa.Text(), nullable=False),
        sa.Column("key_hash", sa.LargeBinary(), nullable=False),
        sa.Column("is_admin", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.tenant_id"], name=op.f("api_keys_tenant_id_fkey")),
        sa.PrimaryKeyConstraint("key_id", name=op.f("api_keys_pkey")),
        sa.UniqueConstraint("prefix", name=op.f("api_keys_prefix_key")),
    )
    for table in ("generations", "attempts", "chunks"):
        op.execute(f"CREATE TABLE {table}_default PARTITION OF {table} DEFAULT")


def downgrade() -> None:
    for table in (
        "api_keys",
        "tenants",
        "worker_sessions",
        "usage_ledger",
        "dead_letters",
        "request_keys",
        "chunks",
        "attempts",
        "generations",
    ):
        op.drop_table(table)
