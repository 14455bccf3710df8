"""`sluice migrate`: the schema of the database."""

import os
from typing import Annotated

import typer

from sluice.console import say
from sluice.errors import UserError
from state_store.postgres.migrate import upgrade


def migrate_command(
    dsn: Annotated[str | None, typer.Option(help="libpq URL; default: SLUICE_POSTGRES_DSN.")] = None,
) -> None:
    """Bring the database to the schema of this version; harmless when it is there already."""
    target = dsn or os.environ.get("SLUICE_POSTGRES_DSN")
    if not target:
        raise UserError("name the database with --dsn or SLUICE_POSTGRES_DSN")
    upgrade(target)
    say("the schema is up to date")
