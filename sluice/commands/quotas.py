"""`sluice quotas`: the limits of tenants and keys."""

from typing import Annotated

import typer

from sluice.commands.database import Dsn, with_store
from sluice.errors import UserError
from sluice.keys import operator, parse_tenant
from sluice.listing import Format, Value, write_rows
from sluice.tenants import QUOTA_COLUMNS, find_key, find_tenant, parse_limits, quota_fields
from state_store.postgres.store import PostgresStore
from state_store.tenant_changes import LIMIT_NAMES
from state_store.tenant_store import KeyChange, TenantChange
from state_store.tenants import UNLIMITED, ApiKey, Tenant

app = typer.Typer(help="Limits of tenants and keys.", no_args_is_help=True)

OfTenant = Annotated[str | None, typer.Option("--tenant", help="Id of the tenant, over all its keys.")]
OfKey = Annotated[str | None, typer.Option("--key", help="Id or prefix of one key, within its tenant's limits.")]
AsFormat = Annotated[Format, typer.Option("--format", help="How to print.")]
Limit = Annotated[str | None, typer.Option(metavar="N|unlimited", show_default=False)]

_SHOW_EXAMPLES = """Examples:\n
\b
  sluice quotas show --tenant team-a
  sluice quotas show --key KEY --format json
"""
_SET_EXAMPLES = """Examples:\n
\b
  sluice quotas set --tenant team-a --requests-per-minute 600 --tokens-per-day 5000000
  sluice quotas set --key KEY --max-concurrent 4
  sluice quotas set --tenant team-a --tokens-per-day unlimited
"""
_CLEAR_EXAMPLES = """Examples:\n
\b
  sluice quotas clear --tenant team-a
  sluice quotas clear --key KEY
"""


@app.command("show", epilog=_SHOW_EXAMPLES)
def show_command(*, tenant: OfTenant = None, key: OfKey = None, form: AsFormat = Format.TABLE, dsn: Dsn = None) -> None:
    """Show the limits of a tenant, or of a key and its tenant. A minute is any 60 s; day and month are those of UTC."""
    _show(with_store(dsn, lambda store: _find(store, tenant, key)), form)


@app.command("set", epilog=_SET_EXAMPLES)
def set_command(
    *,
    tenant: OfTenant = None,
    key: OfKey = None,
    requests_per_minute: Limit = None,
    tokens_per_minute: Limit = None,
    max_concurrent: Limit = None,
    tokens_per_day: Limit = None,
    tokens_per_month: Limit = None,
    form: AsFormat = Format.TABLE,
    dsn: Dsn = None,
) -> None:
    """Set limits; those that are not named stay. In effect everywhere within 5 s."""
    given = (requests_per_minute, tokens_per_minute, max_concurrent, tokens_per_day, tokens_per_month)
    wishes = dict(zip(LIMIT_NAMES, given, strict=True))

    async def change(store: PostgresStore) -> Tenant | ApiKey:
        subject = await _find(store, tenant, key)
        limits = parse_limits(wishes)
        if isinstance(subject, Tenant):
            return await store.update_tenant(subject.tenant_id, TenantChange(named_limits=limits), actor=operator())
        return await store.update_key(subject.key_id, KeyChange(named_limits=limits), actor=operator())

    _show(with_store(dsn, change), form)


@app.command("clear", epilog=_CLEAR_EXAMPLES)
def clear_command(
    *, tenant: OfTenant = None, key: OfKey = None, form: AsFormat = Format.TABLE, dsn: Dsn = None
) -> None:
    """Take all limits away."""

    async def change(store: PostgresStore) -> Tenant | ApiKey:
        subject = await _find(store, tenant, key)
        if isinstance(subject, Tenant):
            return await store.update_tenant(subject.tenant_id, TenantChange(limits=UNLIMITED), actor=operator())
        return await store.update_key(subject.key_id, KeyChange(limits=UNLIMITED), actor=operator())

    _show(with_store(dsn, change), form)


async def _find(store: PostgresStore, tenant: str | None, key: str | None) -> Tenant | ApiKey:
    if tenant is not None and key is None:
        return await find_tenant(store, parse_tenant(tenant))
    if key is not None and tenant is None:
        return await find_key(store, key)
    raise UserError("name a tenant with --tenant, or a key with --key")


def _show(subject: Tenant | ApiKey, form: Format) -> None:
    rows: list[dict[str, Value]] = []
    if isinstance(subject, ApiKey):
        rows.append(quota_fields(f"key:{subject.key_id}", subject.limits))
    tenant = subject if isinstance(subject, Tenant) else subject.tenant
    rows.append(quota_fields(f"tenant:{tenant.tenant_id}", tenant.limits))
    write_rows(QUOTA_COLUMNS, rows, form)
