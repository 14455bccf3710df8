"""Log probabilities beside the output tokens. Old rows, and those of requests that do not ask for them, have none.

A nullable column without a default rewrites nothing. `state_store.postgres.rows` says what is in it.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "chunks",
        sa.Column(
            "logprobs", sa.LargeBinary(), nullable=True, comment="msgpack, one array per token; null: not asked for"
        ),
    )


def downgrade() -> None:
    op.drop_column("chunks", "logprobs")
