"""`sluice workers`: who serves which model, for which scheduler, and how busy."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from service_kit.ids import SessionId
from sluice.commands.database import Dsn, with_store
from sluice.listing import Format, write_rows
from sluice.workers import COLUMNS, SHOWN, session_fields
from state_store.model import SessionRecord
from state_store.postgres.store import PostgresStore

WORKERS_EXAMPLES = """Examples:\n
\b
  sluice workers
  sluice workers --model smollm2-135m-instruct
  sluice workers --all --format json
"""


def workers_command(
    *,
    model: Annotated[str | None, typer.Option(help="Only of this model.")] = None,
    include_over: Annotated[
        bool, typer.Option("--all", help="Sessions that are over (LOST, ENDED) too, as long as they are kept.")
    ] = False,
    form: Annotated[Format, typer.Option("--format", help="How to print.")] = Format.TABLE,
    dsn: Dsn = None,
) -> None:
    """List worker sessions with their lease (seconds left) and how many generations they run."""

    async def work(store: PostgresStore) -> tuple[list[SessionRecord], dict[SessionId, int]]:
        return await store.list_sessions(include_over=include_over), await store.running_by_session()

    sessions, running = with_store(dsn, work)
    now = datetime.now(tz=UTC)
    rows = [session_fields(session, running, now) for session in sessions if model in (None, session.model)]
    write_rows(COLUMNS, rows, form, shown=SHOWN, empty="no workers: requests wait in the queue")
