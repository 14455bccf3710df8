"""Tenants and API keys, made by whoever can reach the database."""

import re
import uuid

from service_kit.api_key import mint_api_key, parse_api_key
from service_kit.ids import KeyId, TenantId
from sluice.errors import UserError
from state_store.ports import KeyStore

LOCAL_TENANT = TenantId("local")
_TENANT_FORM = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}\Z")


def parse_tenant(text: str) -> TenantId:
    """Raises UserError."""
    if not _TENANT_FORM.match(text):
        raise UserError(f"{text!r} is not a tenant: use 1 to 63 of a-z 0-9 . _ -, starting with a letter or digit")
    return TenantId(text)


async def create_key(store: KeyStore, tenant_id: TenantId) -> str:
    """A new key of the tenant, which is created when it is new. The text is not kept anywhere."""
    text, minted = mint_api_key()
    await store.create_tenant(tenant_id, name=str(tenant_id))
    await store.create_key(KeyId(str(uuid.uuid4())), tenant_id, prefix=minted.prefix, key_hash=minted.key_hash)
    return text


async def keep_or_create_key(store: KeyStore, text: str, tenant_id: TenantId) -> str:
    """`text` when it is a key that the store knows and that is in force; else a new key of the tenant."""
    presented = parse_api_key(text)
    if presented is not None:
        known = await store.find_key(presented.prefix)
        if known is not None and known.revoked_at is None and presented.is_proven_by(known.key_hash):
            return text
    return await create_key(store, tenant_id)
