"""What a worker session stores keys and values as. Empty for sessions that were opened before: they are compared with none."""

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE worker_sessions ADD COLUMN IF NOT EXISTS kv_dtype text NOT NULL DEFAULT ''")


def downgrade() -> None:
    op.drop_column("worker_sessions", "kv_dtype")
