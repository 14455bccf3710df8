"""Tenants and keys for tests: known ones are taken, new ones made."""

from datetime import datetime

from service_kit.api_key import PresentedKey, mint_api_key
from service_kit.ids import KeyId, TenantId
from state_store.model import PriorityClass
from state_store.tenant_store import NewKey, NewTenant, TenantStore
from state_store.tenants import UNLIMITED, ApiKey, QuotaLimits, Tenant

ACTOR = "operator:test"


async def add_tenant(
    store: TenantStore,
    tenant: str,
    *,
    weight: float = 1.0,
    max_class: PriorityClass = PriorityClass.INTERACTIVE,
    allowed_models: tuple[str, ...] | None = None,
    limits: QuotaLimits = UNLIMITED,
) -> Tenant:
    """The tenant of this id; the fields count when it is new."""
    known = await store.get_tenant(TenantId(tenant))
    if known is not None:
        return known
    new = NewTenant(
        tenant_id=TenantId(tenant),
        name=tenant,
        weight=weight,
        max_class=max_class,
        allowed_models=allowed_models,
        limits=limits,
    )
    return await store.create_tenant(new, actor=ACTOR)


async def store_key(
    store: TenantStore,
    tenant: str,
    presented: PresentedKey,
    *,
    key_id: str | None = None,
    is_admin: bool = False,
    limits: QuotaLimits = UNLIMITED,
    expires_at: datetime | None = None,
) -> ApiKey:
    """A key of a tenant that is there."""
    new = NewKey(
        key_id=KeyId(key_id or f"key-{presented.prefix}"),
        tenant_id=TenantId(tenant),
        prefix=presented.prefix,
        key_hash=presented.key_hash,
        is_admin=is_admin,
        limits=limits,
        expires_at=expires_at,
    )
    return await store.create_key(new, actor=ACTOR)


async def new_key(store: TenantStore, tenant: str, *, is_admin: bool = False) -> str:
    """The text of a new key; the tenant is made when it is new."""
    text, presented = mint_api_key()
    await add_tenant(store, tenant)
    await store_key(store, tenant, presented, is_admin=is_admin)
    return text
