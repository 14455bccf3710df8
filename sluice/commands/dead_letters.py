"""`sluice dead-letters`: generations that were given up, and how to run one again."""

import json
from datetime import UTC, datetime
from typing import Annotated

import typer

from service_kit.ids import TenantId
from sluice.commands.database import Dsn, with_store
from sluice.console import say, write_text
from sluice.dead_letters import (
    details_fields,
    find_details,
    letter_fields,
    render_details,
    render_letters,
    requeue,
)
from sluice.times import parse_since
from state_store.ports import DeadLetterFilter

app = typer.Typer(help="Generations whose attempts were used up.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Id = Annotated[str, typer.Argument(metavar="GENERATION", help="Id of the dead generation.", show_default=False)]

_LIST_EXAMPLES = """Examples:\n
\b
  sluice dead-letters list
  sluice dead-letters list --tenant team-a --since 12h
  sluice dead-letters list --since 2026-01-31T12:00 --json
"""
_SHOW_EXAMPLES = """Examples:\n
\b
  sluice dead-letters show GENERATION
  sluice dead-letters show GENERATION --json
"""
_REQUEUE_EXAMPLES = """Examples:\n
\b
  sluice dead-letters requeue GENERATION
  sluice dead-letters requeue GENERATION --request-id after-the-fix
"""


@app.command("list", epilog=_LIST_EXAMPLES)
def list_command(
    *,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    cause: Annotated[str | None, typer.Option(help="Only those of this cause.")] = None,
    since: Annotated[
        str | None, typer.Option(help="Only those that died since: 90s, 30m, 12h, 7d, or a time (ISO 8601, UTC).")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many, the newest.")] = 50,
    as_json: AsJson = False,
    dsn: Dsn = None,
) -> None:
    """List dead letters, newest first."""
    wanted = DeadLetterFilter(
        tenant_id=TenantId(tenant) if tenant is not None else None,
        reason=cause,
        since=parse_since(since, datetime.now(tz=UTC)) if since is not None else None,
    )
    letters = with_store(dsn, lambda store: store.dead_letters(limit=limit, wanted=wanted))
    if as_json:
        write_text(f"{json.dumps([letter_fields(letter) for letter in letters], indent=2)}\n")
        return
    if not letters:
        say("no dead letters")
        return
    for line in render_letters(letters):
        write_text(f"{line}\n")
    if len(letters) == limit:
        say(f"the newest {limit}; there may be more: raise --limit")


@app.command("show", epilog=_SHOW_EXAMPLES)
def show_command(generation_id: Id, *, as_json: AsJson = False, dsn: Dsn = None) -> None:
    """Show one dead letter with all its attempts; neither prompt nor output."""
    details = with_store(dsn, lambda store: find_details(store, generation_id))
    if as_json:
        write_text(f"{json.dumps(details_fields(details), indent=2)}\n")
        return
    for line in render_details(details):
        write_text(f"{line}\n")


@app.command("requeue", epilog=_REQUEUE_EXAMPLES)
def requeue_command(
    generation_id: Id,
    *,
    request_id: Annotated[
        str | None,
        typer.Option(help="Request id of the new generation; repeating the command then makes no second one."),
    ] = None,
    as_json: AsJson = False,
    dsn: Dsn = None,
) -> None:
    """Run a dead generation's request again, as a new generation; prints its id."""
    record = with_store(dsn, lambda store: requeue(store, generation_id, request_id=request_id))
    if as_json:
        fields = {
            "generation_id": record.generation_id,
            "request_id": record.request_id,
            "requeue_of": generation_id,
            "state": record.state.value,
        }
        write_text(f"{json.dumps(fields, indent=2)}\n")
        return
    write_text(f"{record.generation_id}\n")
    say(f"{record.state}: request {record.request_id} of tenant {record.tenant_id} runs {generation_id} again")
