"""`sluice usage`: what was used, from the ledger of ended generations."""

import asyncio
import os
from datetime import UTC, datetime
from typing import Annotated

import typer

from sluice.commands.access import client_settings
from sluice.commands.database import PATIENT, Dsn, with_store
from sluice.commands.generate import CaCert
from sluice.errors import UserError
from sluice.home import Home, find_home
from sluice.listing import Format, write_rows
from sluice.usage import SUMS, ask_gateway, parse_query, usage_fields

USAGE_EXAMPLES = """Examples:\n
\b
  sluice usage
  sluice usage --tenant team-a --since 7d --group-by day,model
  sluice usage --since 2026-01-01 --until 2026-02-01 --group-by tenant --format csv
  sluice usage --target gateway:50051 --api-key "$ADMIN_KEY" --group-by tenant
"""


def usage_command(
    *,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    since: Annotated[
        str | None, typer.Option(help="Ended at or after: 12h, 7d ago, or a time (ISO 8601, UTC); default: 30d.")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Ended before; default: now.")] = None,
    group_by: Annotated[
        str, typer.Option(help="Some of tenant, key, model, class, state, day, by commas; empty: one sum.")
    ] = "tenant",
    form: Annotated[Format, typer.Option("--format", help="How to print.")] = Format.TABLE,
    target: Annotated[str | None, typer.Option(help="Ask this gateway, host:port, instead of the database.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Admin key for the gateway; default: SLUICE_API_KEY, else the local stack's.")
    ] = None,
    ca_cert: CaCert = None,
    dsn: Dsn = None,
) -> None:
    """Sum generations and tokens. A day is that of the end, in UTC."""
    query = parse_query(tenant=tenant, since=since, until=until, group_by=group_by, now=datetime.now(UTC))
    if target is None and api_key is None and ca_cert is None:
        rows = with_store(dsn, lambda store: store.usage(query), settings=PATIENT)
    elif dsn is not None:
        raise UserError("--dsn asks the database, --target and --api-key ask a gateway: give one of them")
    else:
        home = find_home()
        settings = client_settings(home, target=target, api_key=api_key or _admin_key(home), ca_cert=ca_cert)
        rows = asyncio.run(ask_gateway(settings, query))
    columns = (*(dimension.value for dimension in query.group_by), *SUMS)
    write_rows(columns, [usage_fields(query, row) for row in rows], form, empty="no usage")


def _admin_key(home: Home) -> str | None:
    """The environment's, else the local stack's."""
    given = os.environ.get("SLUICE_API_KEY")
    try:
        return given or home.admin_key.read_text().strip()
    except OSError:
        return None
