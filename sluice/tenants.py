"""Tenants, keys, limits and changes as the command line shows and reads them."""

from collections.abc import Mapping

from service_kit.errors import InvalidArgumentError
from service_kit.ids import KeyId, TenantId
from sluice.errors import UserError
from sluice.keys import operator
from sluice.listing import Value
from state_store.model import PriorityClass
from state_store.tenant_changes import LIMIT_NAMES
from state_store.tenant_rules import check_limits
from state_store.tenant_store import KeyChange, TenantStore
from state_store.tenants import ApiKey, AuditEntry, QuotaLimits, Tenant

TENANT_COLUMNS = ("tenant", "name", "weight", "max_class", "allowed_models", *LIMIT_NAMES, "disabled_at")
TENANT_SHOWN = ("tenant", "name", "weight", "max_class", "allowed_models", "disabled_at")
KEY_COLUMNS = (
    "key",
    "tenant",
    "name",
    "prefix",
    "is_admin",
    *LIMIT_NAMES,
    "created_at",
    "expires_at",
    "revoked_at",
)
KEY_SHOWN = ("key", "tenant", "name", "prefix", "is_admin", "created_at", "expires_at", "revoked_at")
QUOTA_COLUMNS = ("subject", *LIMIT_NAMES)
AUDIT_COLUMNS = ("at", "actor", "action", "target", "details")
_UNLIMITED_WORD = "unlimited"


def tenant_fields(tenant: Tenant) -> dict[str, Value]:
    return {
        "tenant": tenant.tenant_id,
        "name": tenant.name,
        "weight": tenant.weight,
        "max_class": tenant.max_class.value,
        "allowed_models": tenant.allowed_models,
        **_limit_fields(tenant.limits),
        "disabled_at": tenant.disabled_at,
    }


def key_fields(key: ApiKey) -> dict[str, Value]:
    """Neither the key's text, which nobody has, nor its hash."""
    return {
        "key": key.key_id,
        "tenant": key.tenant.tenant_id,
        "name": key.name,
        "prefix": key.prefix,
        "is_admin": key.is_admin,
        **_limit_fields(key.limits),
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
    }


def quota_fields(subject: str, limits: QuotaLimits) -> dict[str, Value]:
    return {"subject": subject, **_limit_fields(limits)}


def audit_fields(entry: AuditEntry) -> dict[str, Value]:
    return {
        "at": entry.at,
        "actor": entry.actor,
        "action": entry.action,
        "target": entry.target,
        "details": "; ".join(f"{name}: {value}" for name, value in sorted(entry.details.items())),
    }


def parse_class(text: str) -> PriorityClass:
    """Raises UserError."""
    try:
        return PriorityClass(text.upper())
    except ValueError:
        raise UserError(f"--max-class {text!r}: must be interactive, standard or batch") from None


def parse_limits(wishes: Mapping[str, str | None]) -> dict[str, int | None]:
    """The limits that `wishes` names: a number, or "unlimited", which is None. Raises UserError."""
    named = {name: text for name, text in wishes.items() if text is not None}
    if not named:
        raise UserError(f"name at least one limit: {', '.join(_option(name) for name in LIMIT_NAMES)}")
    values = {name: _parse_limit(name, text) for name, text in named.items()}
    try:
        check_limits(QuotaLimits(**values), "limits")
    except InvalidArgumentError as error:
        name = error.field.rpartition(".")[2]
        raise UserError(f"{_option(name)} {named.get(name)}: {error.violations[0].description}") from None
    return values


async def find_tenant(store: TenantStore, tenant_id: TenantId) -> Tenant:
    """Raises UserError."""
    tenant = await store.get_tenant(tenant_id)
    if tenant is None:
        raise UserError(f"there is no tenant {tenant_id}")
    return tenant


async def find_key(store: TenantStore, text: str) -> ApiKey:
    """By its id or its prefix. Raises UnknownKeyError and UserError."""
    if not text.isprintable():
        raise UserError(f"{text!r} is neither id nor prefix of a key")
    known = await store.find_key(text)
    # A change of nothing reads the key, and is not written down.
    return known if known is not None else await store.update_key(KeyId(text), KeyChange(), actor=operator())


def _parse_limit(name: str, text: str) -> int | None:
    if text == _UNLIMITED_WORD:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 18):  # noqa: PLR2004 - longer ones are far out of range
        raise UserError(f"{_option(name)} {text!r}: give a number, or {_UNLIMITED_WORD}")
    return int(text)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _limit_fields(limits: QuotaLimits) -> dict[str, Value]:
    return {name: getattr(limits, name) for name in LIMIT_NAMES}
