"""Tenants on both adapters."""

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest

from service_kit.errors import AlreadyExistsError, Reason
from service_kit.ids import TenantId
from state_store.errors import UnknownTenantError
from state_store.model import PriorityClass
from state_store.tenant_store import NewTenant, TenantChange
from state_store.tenants import UNLIMITED, QuotaLimits, Tenant
from tests.support.generations import NOW, TENANT, Store
from tests.support.tenants import ACTOR, add_tenant

LIMITS = QuotaLimits(
    requests_per_minute=1, tokens_per_minute=2, max_concurrent=3, tokens_per_day=4, tokens_per_month=2**63 - 1
)


async def test_a_tenant_is_stored_as_it_was_made(store: Store) -> None:
    new = NewTenant(
        tenant_id=TENANT,
        name="Team Ä",
        weight=2.5,
        max_class=PriorityClass.BATCH,
        allowed_models=("tiny", "large"),
        limits=LIMITS,
    )
    tenant = await store.create_tenant(new, actor=ACTOR)
    expected = Tenant(
        tenant_id=TENANT,
        name="Team Ä",
        weight=2.5,
        max_class=PriorityClass.BATCH,
        allowed_models=("tiny", "large"),
        limits=LIMITS,
    )
    assert tenant == expected == await store.get_tenant(TENANT)
    assert await store.get_tenant(TenantId("nobody")) is None
    plain = await store.create_tenant(NewTenant(tenant_id=TenantId("plain"), name=""), actor=ACTOR)
    assert (plain.limits, plain.allowed_models, plain.disabled_at) == (UNLIMITED, None, None)
    assert await store.get_tenant(plain.tenant_id) == plain


async def test_an_id_that_is_taken_is_refused_and_its_tenant_stays(store: Store) -> None:
    first = await add_tenant(store, TENANT, weight=3)
    with pytest.raises(AlreadyExistsError) as refused:
        await store.create_tenant(NewTenant(tenant_id=TENANT, name="other"), actor=ACTOR)
    assert refused.value.reason == Reason.TENANT_EXISTS
    assert await store.get_tenant(TENANT) == first
    assert len(await store.list_audit(target=TENANT, before=None, limit=9)) == 1


async def test_of_many_that_create_one_tenant_at_once_one_wins_and_is_written_down(store: Store) -> None:
    wishes = [NewTenant(tenant_id=TENANT, name=f"name-{number}") for number in range(6)]
    answers = await asyncio.gather(
        *(store.create_tenant(wish, actor=f"operator:{wish.name}") for wish in wishes), return_exceptions=True
    )
    [winner] = [answer for answer in answers if isinstance(answer, Tenant)]
    losers = [answer for answer in answers if isinstance(answer, AlreadyExistsError)]
    assert (len(losers), await store.get_tenant(TENANT)) == (5, winner)
    [entry] = await store.list_audit(target=None, before=None, limit=9)
    assert (entry.actor, entry.details["name"]) == (f"operator:{winner.name}", winner.name)


async def test_a_change_touches_what_it_names_and_is_written_down(store: Store) -> None:
    before = await add_tenant(store, TENANT, allowed_models=("tiny",), limits=LIMITS)
    after = await store.update_tenant(TENANT, TenantChange(weight=3), actor="key:k", now=NOW)
    assert after == replace(before, weight=3) == await store.get_tenant(TENANT)
    [entry, _] = await store.list_audit(target=TENANT, before=None, limit=9)
    assert (entry.action, entry.actor, entry.at, entry.details) == (
        "tenant.update",
        "key:k",
        NOW,
        {"weight": "1 -> 3"},
    )
    change = TenantChange(
        name="new", max_class=PriorityClass.BATCH, allows_all_models=True, limits=QuotaLimits(max_concurrent=7)
    )
    after = await store.update_tenant(TENANT, change, actor=ACTOR)
    assert (after.name, after.max_class, after.allowed_models, after.limits) == (
        "new",
        PriorityClass.BATCH,
        None,
        QuotaLimits(max_concurrent=7),
    )
    assert await store.get_tenant(TENANT) == after
    [entry, *_] = await store.list_audit(target=TENANT, before=None, limit=9)
    assert entry.details["limits.max_concurrent"] == "3 -> 7"
    assert entry.details["limits.tokens_per_day"] == "4 -> unlimited"
    assert entry.details["allowed_models"] == "tiny -> all"
    none = await store.update_tenant(TENANT, TenantChange(allowed_models=()), actor=ACTOR)
    assert (none.allowed_models, none.may_use("tiny")) == ((), False)
    assert await store.get_tenant(TENANT) == none


async def test_limits_named_by_changes_at_once_all_hold_and_the_others_stay(store: Store) -> None:
    await add_tenant(store, TENANT, limits=LIMITS)
    named = {"requests_per_minute": 100, "max_concurrent": None, "tokens_per_day": 7}
    changes = [TenantChange(named_limits={name: limit}) for name, limit in named.items()]
    await asyncio.gather(*(store.update_tenant(TENANT, change, actor=ACTOR) for change in changes))
    tenant = await store.get_tenant(TENANT)
    assert tenant is not None
    assert tenant.limits == replace(LIMITS, requests_per_minute=100, max_concurrent=None, tokens_per_day=7)
    *changed, _ = await store.list_audit(target=TENANT, before=None, limit=9)
    assert sorted(text for entry in changed for text in entry.details.items()) == [
        ("limits.max_concurrent", "3 -> unlimited"),
        ("limits.requests_per_minute", "1 -> 100"),
        ("limits.tokens_per_day", "4 -> 7"),
    ]


async def test_a_tenant_is_disabled_once_and_enabled_again(store: Store) -> None:
    await add_tenant(store, TENANT)
    disable, enable = TenantChange(is_disabled=True), TenantChange(is_disabled=False)
    first = await store.update_tenant(TENANT, disable, actor=ACTOR, now=NOW)
    again = await store.update_tenant(TENANT, disable, actor=ACTOR, now=NOW + timedelta(days=1))
    assert first.disabled_at == again.disabled_at == NOW
    enabled = await store.update_tenant(TENANT, enable, actor=ACTOR)
    assert enabled.disabled_at is None
    entries = await store.list_audit(target=TENANT, before=None, limit=9)
    assert [entry.details.get("disabled") for entry in entries] == ["yes -> no", "no -> yes", "no"]


async def test_what_changes_nothing_and_what_fails_is_not_written_down(store: Store) -> None:
    await add_tenant(store, TENANT)
    await store.update_tenant(TENANT, TenantChange(weight=1, limits=UNLIMITED, is_disabled=False), actor=ACTOR)
    with pytest.raises(UnknownTenantError) as refused:
        await store.update_tenant(TenantId("nobody"), TenantChange(weight=2), actor=ACTOR)
    assert refused.value.reason == Reason.TENANT_NOT_FOUND
    assert [entry.action for entry in await store.list_audit(target=None, before=None, limit=9)] == ["tenant.create"]


async def test_changes_at_once_are_made_one_after_the_other(store: Store) -> None:
    await add_tenant(store, TENANT)
    changes = [TenantChange(weight=2), TenantChange(name="new"), TenantChange(max_class=PriorityClass.BATCH)]
    await asyncio.gather(*(store.update_tenant(TENANT, change, actor=ACTOR) for change in changes))
    tenant = await store.get_tenant(TENANT)
    assert tenant is not None
    assert (tenant.weight, tenant.name, tenant.max_class) == (2, "new", PriorityClass.BATCH)
    assert len(await store.list_audit(target=TENANT, before=None, limit=9)) == 4


async def test_tenants_are_paged_by_id_byte_by_byte(store: Store) -> None:
    names = ["a-b", "a.b", "a0", "ab", "a_b", "b"]
    for name in reversed(names):
        await add_tenant(store, name)
    listed: list[str] = []
    after: TenantId | None = None
    while page := await store.list_tenants(after=after, limit=2):
        assert len(page) <= 2
        listed += [tenant.tenant_id for tenant in page]
        after = page[-1].tenant_id
    assert listed == sorted(names)


async def test_weights_are_those_of_the_tenants_that_exist(store: Store) -> None:
    await add_tenant(store, "a", weight=0.001)
    await add_tenant(store, "b", weight=1000)
    wanted = [TenantId(name) for name in ("a", "b", "nobody")]
    assert await store.weights(wanted) == {"a": 0.001, "b": 1000}
    assert await store.weights([]) == {}


async def test_the_record_of_changes_is_paged_newest_first_and_by_target(store: Store) -> None:
    for name in ("a", "b"):
        await add_tenant(store, name)
        for weight in (2, 3):
            await store.update_tenant(TenantId(name), TenantChange(weight=weight), actor=ACTOR)
    everything = await store.list_audit(target=None, before=None, limit=9)
    assert [entry.target for entry in everything] == ["b"] * 3 + ["a"] * 3
    assert [entry.audit_id for entry in everything] == sorted((it.audit_id for it in everything), reverse=True)
    first = await store.list_audit(target="a", before=None, limit=2)
    second = await store.list_audit(target="a", before=first[-1].audit_id, limit=2)
    assert first + second == everything[3:]
    assert await store.list_audit(target="a", before=second[-1].audit_id, limit=2) == []
