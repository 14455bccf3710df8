"""Tenants and API keys, made by whoever can reach the database."""

import contextlib
import getpass
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime

from service_kit.api_key import mint_api_key, parse_api_key
from service_kit.errors import AlreadyExistsError, InvalidArgumentError
from service_kit.ids import KeyId, TenantId
from sluice.errors import UserError
from state_store.tenant_changes import is_over
from state_store.tenant_rules import check_tenant_id
from state_store.tenant_store import NewKey, NewTenant, TenantStore
from state_store.tenants import UNLIMITED, ApiKey, QuotaLimits

LOCAL_TENANT = TenantId("local")
ADMIN_TENANT = TenantId("admin")
"""Whose the local stack's admin key is: nobody's traffic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeKey:
    """`text` is the key itself, kept nowhere."""

    text: str = field(repr=False)
    key: ApiKey


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyWish:
    """What a new key shall be."""

    tenant_id: TenantId
    name: str = ""
    is_admin: bool = False
    limits: QuotaLimits = UNLIMITED
    expires_at: datetime | None = None


def operator() -> str:
    """Who changes things on the database, for the audit."""
    try:
        return f"operator:{getpass.getuser()}"
    except (KeyError, OSError):  # a container's user without a name
        return "operator:unknown"


def parse_tenant(text: str) -> TenantId:
    """Raises UserError."""
    try:
        return check_tenant_id(text, "tenant")
    except InvalidArgumentError as error:
        raise UserError(f"{text!r} is not a tenant: it {error.violations[0].description}") from None


async def make_key(store: TenantStore, wish: KeyWish) -> MadeKey:
    """A new key; its tenant is created when it is new."""
    if await store.get_tenant(wish.tenant_id) is None:
        with contextlib.suppress(AlreadyExistsError):
            await store.create_tenant(NewTenant(tenant_id=wish.tenant_id, name=str(wish.tenant_id)), actor=operator())
    text, minted = mint_api_key()
    new = NewKey(
        key_id=KeyId(str(uuid.uuid4())),
        tenant_id=wish.tenant_id,
        name=wish.name,
        prefix=minted.prefix,
        key_hash=minted.key_hash,
        is_admin=wish.is_admin,
        limits=wish.limits,
        expires_at=wish.expires_at,
    )
    return MadeKey(text=text, key=await store.create_key(new, actor=operator()))


async def create_key(store: TenantStore, tenant_id: TenantId, *, is_admin: bool = False) -> str:
    """The text of a new key of the tenant."""
    return (await make_key(store, KeyWish(tenant_id=tenant_id, is_admin=is_admin))).text


async def keep_or_create_key(store: TenantStore, text: str, tenant_id: TenantId, *, is_admin: bool = False) -> str:
    """`text` when it is a key of the tenant that is in force and has these rights; else the text of a new one."""
    presented = parse_api_key(text)
    if presented is not None:
        known = await store.find_key(presented.prefix)
        if (
            known is not None
            and known.tenant.tenant_id == tenant_id
            and known.is_admin == is_admin
            and not is_over(known, datetime.now(UTC))
            and presented.is_proven_by(known.key_hash)
        ):
            return text
    return await create_key(store, tenant_id, is_admin=is_admin)
