"""`sluice tenants`: who is served, with which share, models and classes."""

from typing import Annotated

import typer

from sluice.commands.database import Dsn, with_store
from sluice.console import say
from sluice.errors import UserError
from sluice.keys import operator, parse_tenant
from sluice.listing import Format, write_facts, write_rows
from sluice.tenants import TENANT_COLUMNS, TENANT_SHOWN, find_tenant, parse_class, tenant_fields
from state_store.model import PriorityClass
from state_store.tenant_rules import check_models, check_name, check_weight
from state_store.tenant_store import NewTenant, TenantChange

app = typer.Typer(help="Tenants.", no_args_is_help=True)

Id = Annotated[str, typer.Argument(metavar="TENANT", help="Id of the tenant.", show_default=False)]
Name = Annotated[str | None, typer.Option(help="Name for people; default of a new one: the id.")]
Weight = Annotated[float | None, typer.Option(help="Share of the tokens beside other tenants; 1 is usual.")]
MaxClass = Annotated[
    str | None, typer.Option(help="Highest class it may ask for: interactive (default of a new one), standard, batch.")
]
Models = Annotated[
    list[str] | None, typer.Option("--model", help="A model it may use; repeat it for more. Without: all models.")
]
AsFormat = Annotated[Format, typer.Option("--format", help="How to print.")]

_CREATE_EXAMPLES = """Examples:\n
\b
  sluice tenants create team-a
  sluice tenants create team-a --name "Team A" --weight 3 --max-class standard
  sluice tenants create team-b --model smollm2-135m-instruct --format json
"""
_LIST_EXAMPLES = """Examples:\n
\b
  sluice tenants list
  sluice tenants list --format csv
"""
_SHOW_EXAMPLES = """Examples:\n
\b
  sluice tenants show team-a
  sluice tenants show team-a --format json
"""
_UPDATE_EXAMPLES = """Examples:\n
\b
  sluice tenants update team-a --weight 2
  sluice tenants update team-a --model smollm2-135m-instruct --model tiny
  sluice tenants update team-a --all-models
"""
_DISABLE_EXAMPLES = """Examples:\n
\b
  sluice tenants disable team-a
"""
_ENABLE_EXAMPLES = """Examples:\n
\b
  sluice tenants enable team-a
"""


@app.command("create", epilog=_CREATE_EXAMPLES)
def create_command(
    tenant: Id,
    *,
    name: Name = None,
    weight: Weight = None,
    max_class: MaxClass = None,
    models: Models = None,
    form: AsFormat = Format.TABLE,
    dsn: Dsn = None,
) -> None:
    """Make a tenant. Its limits are set by `sluice quotas set`, its keys made by `sluice keys create`."""
    tenant_id = parse_tenant(tenant)
    new = NewTenant(
        tenant_id=tenant_id,
        name=check_name(name, "--name") if name is not None else str(tenant_id),
        weight=check_weight(weight, "--weight") if weight is not None else 1.0,
        max_class=parse_class(max_class) if max_class is not None else PriorityClass.INTERACTIVE,
        allowed_models=check_models(models, "--model") if models else None,
    )
    made = with_store(dsn, lambda store: store.create_tenant(new, actor=operator()))
    write_facts(tenant_fields(made), form)


@app.command("list", epilog=_LIST_EXAMPLES)
def list_command(
    *,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="At most so many.")] = 1000,
    form: AsFormat = Format.TABLE,
    dsn: Dsn = None,
) -> None:
    """List tenants, by id."""
    tenants = with_store(dsn, lambda store: store.list_tenants(after=None, limit=limit))
    rows = [tenant_fields(tenant) for tenant in tenants]
    write_rows(TENANT_COLUMNS, rows, form, shown=TENANT_SHOWN, empty="no tenants")
    if len(tenants) == limit:
        say(f"the first {limit}; there may be more: raise --limit")


@app.command("show", epilog=_SHOW_EXAMPLES)
def show_command(tenant: Id, *, form: AsFormat = Format.TABLE, dsn: Dsn = None) -> None:
    """Show one tenant."""
    tenant_id = parse_tenant(tenant)
    write_facts(tenant_fields(with_store(dsn, lambda store: find_tenant(store, tenant_id))), form)


@app.command("update", epilog=_UPDATE_EXAMPLES)
def update_command(
    tenant: Id,
    *,
    name: Name = None,
    weight: Weight = None,
    max_class: MaxClass = None,
    models: Models = None,
    all_models: Annotated[bool, typer.Option("--all-models", help="It may use all models again.")] = False,
    form: AsFormat = Format.TABLE,
    dsn: Dsn = None,
) -> None:
    """Change a tenant; what is not named stays. In effect everywhere within 5 s."""
    if models and all_models:
        raise UserError("--all-models contradicts --model")
    change = TenantChange(
        name=check_name(name, "--name") if name is not None else None,
        weight=check_weight(weight, "--weight") if weight is not None else None,
        max_class=parse_class(max_class) if max_class is not None else None,
        allowed_models=check_models(models, "--model") if models else None,
        allows_all_models=all_models,
    )
    if change == TenantChange():
        raise UserError("name what to change: --name, --weight, --max-class, --model or --all-models")
    _update(tenant, change, form, dsn)


@app.command("disable", epilog=_DISABLE_EXAMPLES)
def disable_command(tenant: Id, *, form: AsFormat = Format.TABLE, dsn: Dsn = None) -> None:
    """Refuse all keys of a tenant, within 5 s everywhere. What it has running goes on."""
    _update(tenant, TenantChange(is_disabled=True), form, dsn)


@app.command("enable", epilog=_ENABLE_EXAMPLES)
def enable_command(tenant: Id, *, form: AsFormat = Format.TABLE, dsn: Dsn = None) -> None:
    """Take the keys of a disabled tenant again."""
    _update(tenant, TenantChange(is_disabled=False), form, dsn)


def _update(tenant: str, change: TenantChange, form: Format, dsn: str | None) -> None:
    tenant_id = parse_tenant(tenant)
    changed = with_store(dsn, lambda store: store.update_tenant(tenant_id, change, actor=operator()))
    write_facts(tenant_fields(changed), form)
