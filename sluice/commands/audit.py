"""`sluice audit`: what administrators changed."""

from typing import Annotated

import typer

from sluice.commands.database import Dsn, with_store
from sluice.console import say
from sluice.errors import UserError
from sluice.listing import Format, write_rows
from sluice.tenants import AUDIT_COLUMNS, audit_fields

AUDIT_EXAMPLES = """Examples:\n
\b
  sluice audit
  sluice audit --target team-a --format json
"""


def audit_command(
    *,
    target: Annotated[str | None, typer.Option(help="Only changes of this tenant or key, by its id.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="At most so many, the newest.")] = 50,
    form: Annotated[Format, typer.Option("--format", help="How to print.")] = Format.TABLE,
    dsn: Dsn = None,
) -> None:
    """List changes of tenants and keys, newest first, with who made them."""
    if target is not None and not target.isprintable():
        raise UserError(f"--target {target!r}: is no id of a tenant or key")
    entries = with_store(dsn, lambda store: store.list_audit(target=target, before=None, limit=limit))
    write_rows(AUDIT_COLUMNS, [audit_fields(entry) for entry in entries], form, empty="no changes")
    if len(entries) == limit:
        say(f"the newest {limit}; there may be more: raise --limit")
