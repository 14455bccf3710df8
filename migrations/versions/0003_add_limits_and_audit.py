"""Limits and allowed models of tenants and keys, names of keys, and the record of what administrators changed.

Every new column is nullable or has a constant default, so no row is rewritten; the names of limits are the same in both
tables. Ids are sorted byte by byte from now on: a page then ends where every process thinks that it does. The ledger's index
is built beside the traffic, and before everything else: a run that was interrupted is repeated as a whole.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrent", "tokens_per_day", "tokens_per_month")
_LIMITS_CHECK = " AND ".join(f"{name} >= 1" for name in _LIMITS)


def upgrade() -> None:
    with op.get_context().autocommit_block():
        op.execute(
            "DROP INDEX IF EXISTS usage_ledger_finished_at_idx"
        )  # a concurrent build that failed leaves an invalid one
        op.execute("CREATE INDEX CONCURRENTLY usage_ledger_finished_at_idx ON usage_ledger (finished_at)")
    op.execute('ALTER TABLE tenants ALTER COLUMN tenant_id TYPE text COLLATE "C"')
    op.execute('ALTER TABLE api_keys ALTER COLUMN key_id TYPE text COLLATE "C"')
    op.add_column(
        "tenants", sa.Column("allowed_models", postgresql.ARRAY(sa.Text()), nullable=True, comment="null: all")
    )
    op.add_column("api_keys", sa.Column("name", sa.Text(), server_default=sa.text("''"), nullable=False))
    for table in ("tenants", "api_keys"):
        for limit in _LIMITS:
            op.add_column(table, sa.Column(limit, sa.BigInteger(), nullable=True, comment="null: unlimited"))
        op.create_check_constraint(op.f(f"{table}_limits_check"), table, _LIMITS_CHECK)
    op.drop_constraint("tenants_weight_check", "tenants")
    op.create_check_constraint(op.f("tenants_weight_check"), "tenants", "weight BETWEEN 0.001 AND 1000")
    op.create_index("api_keys_created_at_idx", "api_keys", ["created_at", "key_id"], unique=False)
    op.create_index("api_keys_tenant_idx", "api_keys", ["tenant_id", "created_at", "key_id"], unique=False)
    op.create_table(
        "admin_audit",
        sa.Column("audit_id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("details", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.CheckConstraint("jsonb_typeof(details) = 'object'", name=op.f("admin_audit_details_check")),
        sa.PrimaryKeyConstraint("audit_id", name=op.f("admin_audit_pkey")),
    )
    op.create_index("admin_audit_target_idx", "admin_audit", ["target", "audit_id"], unique=False)


def downgrade() -> None:
    op.drop_index("usage_ledger_finished_at_idx", "usage_ledger")
    op.drop_table("admin_audit")
    op.drop_index("api_keys_tenant_idx", "api_keys")
    op.drop_index("api_keys_created_at_idx", "api_keys")
    op.drop_constraint("tenants_weight_check", "tenants")
    op.create_check_constraint(op.f("tenants_weight_check"), "tenants", "weight > 0")
    for table in ("tenants", "api_keys"):
        op.drop_constraint(f"{table}_limits_check", table)
        for limit in _LIMITS:
            op.drop_column(table, limit)
    op.drop_column("api_keys", "name")
    op.drop_column("tenants", "allowed_models")
    op.execute('ALTER TABLE api_keys ALTER COLUMN key_id TYPE text COLLATE "default"')
    op.execute('ALTER TABLE tenants ALTER COLUMN tenant_id TYPE text COLLATE "default"')
