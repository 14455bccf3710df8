"""Alembic's environment: one migrating process at a time, each migration in its own transaction."""

import os

from alembic import context
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.pool import NullPool

from state_store.postgres.partitions import PARTITION_NAME
from state_store.postgres.schema import metadata

_LOCK_KEY = 0x51D1CE00


def _include_name(name: str | None, kind: str, parents: object) -> bool:
    """Partitions come and go with time; they are no part of the schema."""
    del parents
    return kind != "table" or name is None or PARTITION_NAME.match(name) is None


def _dsn() -> str:
    dsn = context.config.attributes.get("dsn") or os.environ.get("SLUICE_POSTGRES_DSN")
    if not dsn:
        raise SystemExit("set SLUICE_POSTGRES_DSN to the database to migrate")
    return str(dsn)


def _run() -> None:
    engine = create_engine(make_url(_dsn()).set(drivername="postgresql+psycopg"), poolclass=NullPool)
    with engine.connect() as connection:
        connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": _LOCK_KEY})
        connection.commit()
        context.configure(
            connection=connection,
            target_metadata=metadata,
            include_name=_include_name,
            compare_server_default=True,
            transaction_per_migration=True,
        )
        with context.begin_transaction():
            context.run_migrations()
    engine.dispose()


_run()
