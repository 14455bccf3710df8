"""Generations in Postgres: the four parts of GenerationStore together."""

from state_store.postgres.attempts import PostgresAttempts
from state_store.postgres.finish import PostgresFinish
from state_store.postgres.reads import PostgresReads
from state_store.postgres.submit import PostgresSubmit


class PostgresGenerations(PostgresSubmit, PostgresAttempts, PostgresFinish, PostgresReads):
    """GenerationStore."""
