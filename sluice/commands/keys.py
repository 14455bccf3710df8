"""`sluice keys`: API keys of tenants."""

import asyncio
import os
from typing import Annotated, Any

import typer

from service_kit.ids import TenantId
from sluice.console import say, write_text
from sluice.errors import UserError
from sluice.home import find_home
from sluice.keys import create_key, parse_tenant
from sluice.run_file import read_run_file
from state_store.postgres.store import PostgresStore

app = typer.Typer(help="API keys.", no_args_is_help=True)


@app.callback()
def keys_group() -> None:
    """API keys of tenants."""


@app.command("create")
def create_command(
    tenant: Annotated[str, typer.Option(help="Whose key; the tenant is created when it is new.")],
    dsn: Annotated[
        str | None, typer.Option(help="Database; default: SLUICE_POSTGRES_DSN, else the local stack's.")
    ] = None,
) -> None:
    """Make a key, and print it once: only its hash is kept."""
    tenant_id = parse_tenant(tenant)
    key = asyncio.run(_create(find_dsn(dsn), tenant_id))
    write_text(f"{key}\n")
    say(f"a key of tenant {tenant}; it is not shown again")


def find_dsn(option: str | None) -> str:
    """Option, then SLUICE_POSTGRES_DSN, then the stack that runs here. Raises UserError."""
    given = option or os.environ.get("SLUICE_POSTGRES_DSN")
    if given:
        return given
    postgres: Any = read_run_file(find_home().run_file).get("postgres", {})
    if "dsn" not in postgres:
        raise UserError("name the database with --dsn or SLUICE_POSTGRES_DSN")
    return str(postgres["dsn"])


async def _create(dsn: str, tenant_id: TenantId) -> str:
    store = PostgresStore(dsn)
    await store.open()
    try:
        return await create_key(store, tenant_id)
    finally:
        await store.close()
