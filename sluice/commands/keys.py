"""`sluice keys`: API keys of tenants."""

import uuid
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from service_kit.api_key import mint_api_key
from service_kit.ids import KeyId
from sluice.commands.database import Dsn, with_store
from sluice.console import say, write_text
from sluice.errors import UserError
from sluice.keys import KeyWish, make_key, operator, parse_tenant
from sluice.listing import Format, write_facts, write_rows
from sluice.tenants import KEY_COLUMNS, KEY_SHOWN, find_key, key_fields
from sluice.times import parse_span
from state_store.postgres.store import PostgresStore
from state_store.tenant_rules import check_expiry, check_name, check_overlap
from state_store.tenant_store import KeyChange, RotatedKey
from state_store.tenants import ApiKey

app = typer.Typer(help="API keys.", no_args_is_help=True)

Key = Annotated[str, typer.Argument(metavar="KEY", help="Id of the key, or its prefix.", show_default=False)]
Name = Annotated[str | None, typer.Option(help="What the key is for.")]
ExpiresIn = Annotated[str | None, typer.Option(help="When it ends by itself, from now: 90s, 30m, 12h, 7d.")]
AsFormat = Annotated[Format, typer.Option("--format", help="How to print.")]

_CREATE_EXAMPLES = """Examples:\n
\b
  sluice keys create --tenant team-a
  sluice keys create --tenant team-a --name ci --expires-in 90d
  sluice keys create --tenant ops --admin > admin-key
"""
_LIST_EXAMPLES = """Examples:\n
\b
  sluice keys list
  sluice keys list --tenant team-a --all --format json
"""
_ROTATE_EXAMPLES = """Examples:\n
\b
  sluice keys rotate KEY > new-key
  sluice keys rotate KEY --overlap 7d
"""
_REVOKE_EXAMPLES = """Examples:\n
\b
  sluice keys revoke KEY
  sluice keys revoke 0123456789ab --format json
"""
_UPDATE_EXAMPLES = """Examples:\n
\b
  sluice keys update KEY --name nightly
  sluice keys update KEY --expires-in 30d
"""


@app.callback()
def keys_group() -> None:
    """API keys of tenants."""


@app.command("create", epilog=_CREATE_EXAMPLES)
def create_command(
    *,
    tenant: Annotated[str, typer.Option(help="Whose key; the tenant is created when it is new.")],
    name: Name = None,
    admin: Annotated[bool, typer.Option("--admin", help="It may call the administrators' service.")] = False,
    expires_in: ExpiresIn = None,
    dsn: Dsn = None,
) -> None:
    """Make a key, and print it once: only its hash is kept."""
    wish = KeyWish(
        tenant_id=parse_tenant(tenant),
        name=check_name(name, "--name") if name is not None else "",
        is_admin=admin,
        expires_at=_parse_expiry(expires_in),
    )
    made = with_store(dsn, lambda store: make_key(store, wish))
    write_text(f"{made.text}\n")
    kind = "an admin key" if admin else "a key"
    say(f"{kind} of tenant {tenant}, id {made.key.key_id}; it is not shown again")


@app.command("list", epilog=_LIST_EXAMPLES)
def list_command(
    *,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    include_over: Annotated[bool, typer.Option("--all", help="Also those that are expired or revoked.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="At most so many, the newest.")] = 1000,
    form: AsFormat = Format.TABLE,
    dsn: Dsn = None,
) -> None:
    """List keys, newest first; never their text."""
    tenant_id = parse_tenant(tenant) if tenant is not None else None
    keys = with_store(
        dsn,
        lambda store: store.list_keys(tenant_id=tenant_id, include_over=include_over, before=None, limit=limit),
    )
    write_rows(KEY_COLUMNS, [key_fields(key) for key in keys], form, shown=KEY_SHOWN, empty="no keys")
    if len(keys) == limit:
        say(f"the newest {limit}; there may be more: raise --limit")


@app.command("rotate", epilog=_ROTATE_EXAMPLES)
def rotate_command(
    key: Key,
    *,
    overlap: Annotated[str, typer.Option(help="How long the old key stays in force: 0s to 90d.")] = "24h",
    dsn: Dsn = None,
) -> None:
    """Make a key that replaces another one, and print it once. The old one stays in force for the overlap."""
    span = check_overlap(parse_span(overlap, "--overlap"), "--overlap")
    text, rotated = with_store(dsn, lambda store: _rotate(store, key, span))
    write_text(f"{text}\n")
    end = rotated.replaced.expires_at
    assert end is not None
    say(
        f"replaces key {rotated.replaced.key_id} of tenant {rotated.key.tenant.tenant_id}, which ends at "
        f"{end.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC; the new one is {rotated.key.key_id} and is not shown again"
    )


@app.command("revoke", epilog=_REVOKE_EXAMPLES)
def revoke_command(key: Key, *, form: AsFormat = Format.TABLE, dsn: Dsn = None) -> None:
    """End a key, within 5 s everywhere. Idempotent."""

    async def revoke(store: PostgresStore) -> ApiKey:
        return await store.revoke_key((await find_key(store, key)).key_id, actor=operator())

    write_facts(key_fields(with_store(dsn, revoke)), form)


@app.command("update", epilog=_UPDATE_EXAMPLES)
def update_command(
    key: Key, *, name: Name = None, expires_in: ExpiresIn = None, form: AsFormat = Format.TABLE, dsn: Dsn = None
) -> None:
    """Change a key; what is not named stays. Its limits are set by `sluice quotas set`."""
    change = KeyChange(
        name=check_name(name, "--name") if name is not None else None, expires_at=_parse_expiry(expires_in)
    )
    if change == KeyChange():
        raise UserError("name what to change: --name or --expires-in")

    async def update(store: PostgresStore) -> ApiKey:
        return await store.update_key((await find_key(store, key)).key_id, change, actor=operator())

    write_facts(key_fields(with_store(dsn, update)), form)


async def _rotate(store: PostgresStore, key: str, overlap: timedelta) -> tuple[str, RotatedKey]:
    old = await find_key(store, key)
    text, minted = mint_api_key()
    rotated = await store.rotate_key(
        old.key_id,
        new_key_id=KeyId(str(uuid.uuid4())),
        prefix=minted.prefix,
        key_hash=minted.key_hash,
        overlap=overlap,
        actor=operator(),
    )
    return text, rotated


def _parse_expiry(expires_in: str | None) -> datetime | None:
    if expires_in is None:
        return None
    now = datetime.now(UTC)
    return check_expiry(now + parse_span(expires_in, "--expires-in"), now, "--expires-in")
