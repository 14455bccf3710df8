"""Generations whose texts are not kept: which they are, when their texts were deleted, and how long the prompt was.

Columns with a constant default rewrite nothing. The index is built beside the traffic, partition by partition; a run that was
interrupted is continued by the next one.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_INDEX = "generations_unstored_idx"
_INDEXED = "(generation_id) WHERE NOT is_stored AND texts_deleted_at IS NULL"
_PARTITIONS = """
SELECT p.relname FROM pg_inherits i JOIN pg_class p ON p.oid = i.inhrelid
WHERE i.inhparent = 'generations'::regclass AND NOT EXISTS (
    SELECT FROM pg_index x JOIN pg_inherits own ON own.inhrelid = x.indexrelid
    WHERE x.indrelid = p.oid AND own.inhparent = 'generations_unstored_idx'::regclass
) ORDER BY p.relname
"""


def upgrade() -> None:
    op.execute(
        "ALTER TABLE generations"
        " ADD COLUMN IF NOT EXISTS is_stored boolean NOT NULL DEFAULT true,"
        " ADD COLUMN IF NOT EXISTS texts_deleted_at timestamptz,"
        " ADD COLUMN IF NOT EXISTS deleted_prompt_tokens bigint NOT NULL DEFAULT 0"
    )
    op.execute("COMMENT ON COLUMN generations.is_stored IS 'false: texts go after the end'")
    op.execute(f"CREATE INDEX IF NOT EXISTS {_INDEX} ON ONLY generations {_INDEXED}")
    partitions = list(op.get_bind().execute(sa.text(_PARTITIONS)).scalars())
    with op.get_context().autocommit_block():
        for partition in partitions:
            index = f"{partition}_unstored_idx"
            op.execute(f"DROP INDEX IF EXISTS {index}")  # a concurrent build that failed leaves an invalid one
            op.execute(f"CREATE INDEX CONCURRENTLY {index} ON {partition} {_INDEXED}")
            op.execute(f"ALTER INDEX {_INDEX} ATTACH PARTITION {index}")


def downgrade() -> None:
    op.drop_index(_INDEX, "generations")
    for column in ("deleted_prompt_tokens", "texts_deleted_at", "is_stored"):
        op.drop_column("generations", column)
