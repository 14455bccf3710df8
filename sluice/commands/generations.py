"""`sluice generations`: what is asked of the service, how each request fared, and how one is ended."""

import json
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer
from redis.asyncio import Redis

from scheduler.redis_cancel_hints import RedisCancelHints
from service_kit.ids import TenantId
from sluice.commands.database import Dsn, with_store
from sluice.commands.redis import RedisUrl, with_stores
from sluice.console import say, write_text
from sluice.generations import (
    COLUMNS,
    SHOWN,
    TIMELINE_COLUMNS,
    TIMELINE_SHOWN,
    Details,
    cancel,
    details_fields,
    find_details,
    generation_fields,
    parse_class,
    parse_states,
    printable,
    timeline,
)
from sluice.listing import Format, write_facts, write_rows
from sluice.times import parse_since
from state_store.delta_log.redis_log import RedisDeltaLog
from state_store.model import GenerationRecord
from state_store.overview_store import GenerationFilter
from state_store.postgres.store import PostgresStore

app = typer.Typer(help="Generations of all tenants.", no_args_is_help=True)

Id = Annotated[str, typer.Argument(metavar="GENERATION", help="Id of the generation.", show_default=False)]
Ids = Annotated[list[str], typer.Argument(metavar="GENERATION", help="Ids of generations.", show_default=False)]
AsFormat = Annotated[Format, typer.Option("--format", help="How to print.")]

_LIST_EXAMPLES = """Examples:\n
\b
  sluice generations list
  sluice generations list --tenant team-a --state failed --state expired --since 12h
  sluice generations list --model smollm2-135m-instruct --class batch --state queued --format csv
"""
_SHOW_EXAMPLES = """Examples:\n
\b
  sluice generations show GENERATION
  sluice generations show GENERATION --text
  sluice generations show GENERATION --format json
"""
_CANCEL_EXAMPLES = """Examples:\n
\b
  sluice generations cancel GENERATION
  sluice generations cancel GENERATION GENERATION --wait 0
"""


@app.command("list", epilog=_LIST_EXAMPLES)
def list_command(
    *,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    states: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            help="Only in this state: queued, running, succeeded, failed, cancelled, expired; repeat for more.",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Only of this model.")] = None,
    priority: Annotated[
        str | None, typer.Option("--class", help="Only of this class: interactive, standard, batch.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="Only those accepted since: 90s, 30m, 12h, 7d, or a time (ISO 8601, UTC).")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="At most so many, the newest.")] = 50,
    form: AsFormat = Format.TABLE,
    dsn: Dsn = None,
) -> None:
    """List generations, newest first."""
    wanted = GenerationFilter(
        tenant_id=TenantId(tenant) if tenant is not None else None,
        states=parse_states(states or ()),
        model=model,
        priority_class=parse_class(priority) if priority is not None else None,
        since=parse_since(since, datetime.now(tz=UTC)) if since is not None else None,
    )
    found = with_store(dsn, lambda store: store.find_generations(wanted, limit=limit))
    write_rows(COLUMNS, [generation_fields(each) for each in found], form, shown=SHOWN, empty="no generations")
    if len(found) == limit:
        say(f"the newest {limit}; there may be more: raise --limit")


@app.command("show", epilog=_SHOW_EXAMPLES)
def show_command(
    generation_id: Id,
    *,
    text: Annotated[
        bool, typer.Option("--text", help="Prompt (as token ids) and output too: your users' words. Needs Redis.")
    ] = False,
    form: AsFormat = Format.TABLE,
    dsn: Dsn = None,
    redis_url: RedisUrl = None,
) -> None:
    """Show one generation: its usage, its end, and what happened when."""

    async def work(store: PostgresStore, redis: Redis) -> Details:
        return await find_details(store, generation_id, log=RedisDeltaLog(redis))

    if text:
        details = with_stores(dsn, redis_url, work)
    else:
        details = with_store(dsn, lambda store: find_details(store, generation_id))
    if form is Format.JSON:
        fields = details_fields(details) | {"timeline": timeline(details)}
        write_text(f"{json.dumps(fields, indent=2, default=datetime.isoformat)}\n")
        return
    facts = details_fields(details)
    write_facts({name: printable(value) if name == "output" else value for name, value in facts.items()}, form)
    if form is Format.TABLE:
        write_text("\n")
        write_rows(TIMELINE_COLUMNS, timeline(details), form, shown=TIMELINE_SHOWN)


@app.command("cancel", epilog=_CANCEL_EXAMPLES)
def cancel_command(
    generation_ids: Ids,
    *,
    wait_s: Annotated[float, typer.Option("--wait", min=0, max=600, help="Seconds to wait for their ends.")] = 5.0,
    form: AsFormat = Format.TABLE,
    dsn: Dsn = None,
    redis_url: RedisUrl = None,
) -> None:
    """End generations: a running one within an engine step, with the output so far. Exit code 1 when one goes on."""

    async def work(store: PostgresStore, redis: Redis) -> list[GenerationRecord]:
        return await cancel(store, RedisCancelHints(redis), generation_ids, patience=timedelta(seconds=wait_s))

    records = with_stores(dsn, redis_url, work)
    write_rows(COLUMNS, [generation_fields(record) for record in records], form, shown=SHOWN)
    if any(not record.state.is_terminal for record in records):
        raise typer.Exit(1)
