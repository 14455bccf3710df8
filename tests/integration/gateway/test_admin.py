"""The administrators' service, over gRPC."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import pytest
import structlog
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from inference.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, types_pb2
from service_kit.rpc_status import RpcFailure, parse_rpc_error
from state_store.memory.store import MemoryStore
from state_store.tenant_rules import MAX_LIMIT
from tests.support.gateway import GatewayRig, add_key, bearer
from tests.support.generations import NOW, end_of_queued, submitted
from tests.support.tenants import new_key

NAN = float("nan")
DAY = timedelta(days=1)
ALL_CALLS = [
    (name, getattr(admin_pb2, f"{name}Request"))
    for name in (
        "CreateTenant",
        "UpdateTenant",
        "GetTenant",
        "ListTenants",
        "CreateKey",
        "UpdateKey",
        "RotateKey",
        "RevokeKey",
        "ListKeys",
        "GetUsage",
        "ListAudit",
    )
]


@dataclass(frozen=True, kw_only=True)
class Admin:
    """A gateway and an administrator's key."""

    stub: Any
    key: str
    store: MemoryStore
    gateway: GatewayRig

    async def call(self, name: str, /, **fields: Any) -> Any:
        request = getattr(admin_pb2, f"{name}Request")(**fields)
        return await getattr(self.stub, name)(request, metadata=bearer(self.key), timeout=20)

    async def failure(self, name: str, /, **fields: Any) -> RpcFailure:
        return await failure_of(self.call(name, **fields))


async def failure_of(call: Any) -> RpcFailure:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return parse_rpc_error(failed.value)


@pytest.fixture
async def admin(gateway: GatewayRig) -> Admin:
    store = gateway.scheduler.store
    return Admin(
        stub=admin_pb2_grpc.AdminServiceStub(gateway.channel),
        key=await new_key(store, "admin", is_admin=True),
        store=store,
        gateway=gateway,
    )


def timestamp(moment: datetime) -> Timestamp:
    message = Timestamp()
    message.FromDatetime(moment)
    return message


async def works(admin: Admin, key: str) -> bool:
    call = admin.gateway.stub.ListModels(inference_pb2.ListModelsRequest(), metadata=bearer(key), timeout=20)
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code() is not grpc.StatusCode.UNAUTHENTICATED
    return True


def test_every_call_of_the_service_is_tested_for_its_key() -> None:
    service = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
    assert [name for name, _ in ALL_CALLS] == [method.name for method in service.methods]


@pytest.mark.parametrize("part", [0, 1, 2])  # one peer's bad keys are limited
async def test_every_call_needs_an_admin_key(admin: Admin, part: int) -> None:
    ordinary = admin.gateway.key
    gone = await new_key(admin.store, "gone", is_admin=True)
    found = await admin.store.find_key(gone.split("-")[2])
    assert found is not None
    await admin.store.revoke_key(found.key_id, actor="operator:test")
    before = await admin.store.list_audit(target=None, before=None, limit=99)
    for name, request_type in ALL_CALLS[part::3]:
        method = getattr(admin.stub, name)
        failure = await failure_of(method(request_type(), metadata=bearer(ordinary), timeout=20))
        assert (failure.code, failure.reason) == (grpc.StatusCode.PERMISSION_DENIED, "ADMIN_KEY_REQUIRED")
        for metadata in ((), bearer(gone)):
            failure = await failure_of(method(request_type(), metadata=metadata, timeout=20))
            assert (failure.code, failure.reason) == (grpc.StatusCode.UNAUTHENTICATED, "INVALID_API_KEY")
    assert await admin.store.list_audit(target=None, before=None, limit=99) == before


async def test_a_tenant_is_made_changed_and_read(admin: Admin) -> None:
    made = await admin.call("CreateTenant", tenant=admin_pb2.Tenant(tenant_id="team-a"))
    assert made.tenant == admin_pb2.Tenant(
        tenant_id="team-a",
        name="team-a",
        weight=1,
        max_class=types_pb2.PRIORITY_CLASS_INTERACTIVE,
        limits=admin_pb2.QuotaLimits(),
    )
    changed = await admin.call(
        "UpdateTenant",
        tenant_id="team-a",
        name="Team A",
        weight=2.5,
        max_class=types_pb2.PRIORITY_CLASS_BATCH,
        allowed_models=admin_pb2.AllowedModels(names=["simulated"]),
        limits=admin_pb2.QuotaLimits(requests_per_minute=5, tokens_per_month=MAX_LIMIT),
        disabled=True,
    )
    assert (changed.tenant.name, changed.tenant.weight) == ("Team A", 2.5)
    assert (changed.tenant.max_class, list(changed.tenant.allowed_models.names)) == (
        types_pb2.PRIORITY_CLASS_BATCH,
        ["simulated"],
    )
    assert changed.tenant.limits == admin_pb2.QuotaLimits(requests_per_minute=5, tokens_per_month=MAX_LIMIT)
    assert changed.tenant.HasField("disabled_time")
    read = await admin.call("GetTenant", tenant_id="team-a")
    assert read.tenant == changed.tenant
    again = await admin.call("UpdateTenant", tenant_id="team-a", allow_all_models=True, disabled=False)
    assert not again.tenant.HasField("allowed_models")
    assert not again.tenant.HasField("disabled_time")
    assert again.tenant.limits == changed.tenant.limits
    none = await admin.call("UpdateTenant", tenant_id="team-a", allowed_models=admin_pb2.AllowedModels())
    assert none.tenant.HasField("allowed_models")
    failure = await admin.failure("CreateTenant", tenant=admin_pb2.Tenant(tenant_id="team-a"))
    assert (failure.code, failure.reason) == (grpc.StatusCode.ALREADY_EXISTS, "TENANT_EXISTS")


async def test_a_key_is_shown_once_works_is_rotated_and_revoked(admin: Admin) -> None:
    await admin.call("CreateTenant", tenant=admin_pb2.Tenant(tenant_id="team-a"))
    end = datetime.now(UTC).replace(microsecond=0) + DAY
    limits = admin_pb2.QuotaLimits(max_concurrent=2)
    made = await admin.call("CreateKey", tenant_id="team-a", name="ci", limits=limits, expire_time=timestamp(end))
    assert await works(admin, made.secret)
    assert (made.key.name, made.key.limits, made.key.is_admin) == ("ci", limits, False)
    assert made.secret.startswith(f"sk-sluice-{made.key.prefix}-")
    rotated = await admin.call("RotateKey", key_id=made.key.key_id)
    assert (rotated.key.name, rotated.key.limits, rotated.key.expire_time) == ("ci", limits, made.key.expire_time)
    left = rotated.replaced.expire_time.ToDatetime(tzinfo=UTC) - datetime.now(UTC)
    assert timedelta(hours=23) < left <= DAY
    assert await works(admin, made.secret)
    assert await works(admin, rotated.secret)
    changed = await admin.call(
        "UpdateKey",
        key_id=rotated.key.key_id,
        name="",
        limits=admin_pb2.QuotaLimits(),
        expire_time=timestamp(end + DAY),
    )
    assert (changed.key.name, changed.key.limits, changed.key.expire_time) == (
        "",
        admin_pb2.QuotaLimits(),
        timestamp(end + DAY),
    )
    unused = (await admin.call("RotateKey", key_id=rotated.key.key_id, overlap=Duration())).secret
    [first, *_] = (await admin.call("ListKeys", tenant_id="team-a")).keys
    revoked = await admin.call("RevokeKey", key_id=first.key_id)
    assert await admin.call("RevokeKey", key_id=first.key_id) == revoked
    assert revoked.key.HasField("revoke_time")
    assert not await works(admin, unused)
    failure = await admin.failure("RotateKey", key_id=first.key_id)
    assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "KEY_NOT_FOUND")


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("GetTenant", {"tenant_id": "nobody"}, "TENANT_NOT_FOUND"),
        ("UpdateTenant", {"tenant_id": "nobody"}, "TENANT_NOT_FOUND"),
        ("CreateKey", {"tenant_id": "nobody"}, "TENANT_NOT_FOUND"),
        ("UpdateKey", {"key_id": "nothing"}, "KEY_NOT_FOUND"),
        ("RotateKey", {"key_id": "nothing"}, "KEY_NOT_FOUND"),
        ("RevokeKey", {"key_id": "nothing"}, "KEY_NOT_FOUND"),
    ],
)
async def test_what_is_unknown_is_not_found(admin: Admin, name: str, fields: dict[str, Any], reason: str) -> None:
    failure = await admin.failure(name, **fields)
    assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, reason)


def tenant(**fields: Any) -> dict[str, Any]:
    return {"tenant": admin_pb2.Tenant(**{"tenant_id": "t", **fields})}


def limits(**fields: int) -> dict[str, Any]:
    return {"limits": admin_pb2.QuotaLimits(**fields)}


def models(*names: str) -> dict[str, Any]:
    return {"allowed_models": admin_pb2.AllowedModels(names=names)}


T = {"tenant_id": "tenant"}
K = {"key_id": "key"}
PAST = timestamp(datetime(2020, 1, 1, tzinfo=UTC))
NO_TIME = Timestamp(seconds=10**15)
BAD_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    ("CreateTenant", {}, "tenant.tenant_id"),
    *(("CreateTenant", tenant(tenant_id=it), "tenant.tenant_id") for it in ("A", "-a", "a" * 64, "a\n", "a\x00", "ä")),
    ("CreateTenant", tenant(name="n" * 101), "tenant.name"),
    ("CreateTenant", tenant(name="a\x00"), "tenant.name"),
    *(("CreateTenant", tenant(weight=it), "tenant.weight") for it in (-1, 0.0009, 1000.1, NAN, float("inf"))),
    ("CreateTenant", tenant(max_class=9), "tenant.max_class"),
    ("CreateTenant", tenant(**limits(max_concurrent=0)), "tenant.limits.max_concurrent"),
    ("CreateTenant", tenant(**limits(tokens_per_day=2**64 - 1)), "tenant.limits.tokens_per_day"),
    ("CreateTenant", tenant(**models("a", "a")), "tenant.allowed_models.names"),
    ("CreateTenant", tenant(**models("a", "")), "tenant.allowed_models.names[1]"),
    ("CreateTenant", tenant(disabled_time=PAST), "tenant.disabled_time"),
    ("UpdateTenant", {}, "tenant_id"),
    ("UpdateTenant", T | {"name": "\n"}, "name"),
    ("UpdateTenant", T | {"weight": 0}, "weight"),
    ("UpdateTenant", T | {"weight": NAN}, "weight"),
    ("UpdateTenant", T | {"max_class": 77}, "max_class"),
    ("UpdateTenant", T | limits(requests_per_minute=0), "limits.requests_per_minute"),
    ("UpdateTenant", T | models("a") | {"allow_all_models": True}, "allow_all_models"),
    ("UpdateTenant", T | models("\x00"), "allowed_models.names[0]"),
    ("GetTenant", {"tenant_id": "A"}, "tenant_id"),
    ("ListTenants", {"page_size": 1001}, "page_size"),
    ("ListTenants", {"page_token": "nonsense"}, "page_token"),
    ("ListTenants", {"page_token": "WzEsICJcdWQ4MDAiLCBbInRlbmFudHMiXV0"}, "page_token"),  # half of a character
    ("CreateKey", {}, "tenant_id"),
    ("CreateKey", T | {"name": "n" * 101}, "name"),
    ("CreateKey", T | limits(tokens_per_minute=MAX_LIMIT + 1), "limits.tokens_per_minute"),
    ("CreateKey", T | {"expire_time": PAST}, "expire_time"),
    ("CreateKey", T | {"expire_time": NO_TIME}, "expire_time"),
    ("UpdateKey", {}, "key_id"),
    ("UpdateKey", K | {"name": "\x00"}, "name"),
    ("UpdateKey", K | limits(tokens_per_month=0), "limits.tokens_per_month"),
    ("UpdateKey", K | {"expire_time": PAST}, "expire_time"),
    ("RotateKey", {"key_id": "a\x00"}, "key_id"),
    ("RotateKey", K | {"overlap": Duration(seconds=-1)}, "overlap"),
    ("RotateKey", K | {"overlap": Duration(seconds=90 * 86_400 + 1)}, "overlap"),
    ("RotateKey", K | {"overlap": Duration(seconds=10**15)}, "overlap"),
    ("RevokeKey", {"key_id": "k" * 101}, "key_id"),
    ("ListKeys", {"tenant_id": "A"}, "tenant_id"),
    ("ListKeys", {"page_size": 1001}, "page_size"),
    ("GetUsage", {"tenant_id": "A"}, "tenant_id"),
    ("GetUsage", {"since_time": NO_TIME}, "since_time"),
    ("GetUsage", {"until_time": PAST}, "since_time"),
    ("GetUsage", {"group_by": [1, 2, 1]}, "group_by"),
    ("GetUsage", {"group_by": [1, 0]}, "group_by[1]"),
    ("GetUsage", {"group_by": [99]}, "group_by[0]"),
    ("ListAudit", {"target": "a\x00"}, "target"),
    ("ListAudit", {"page_token": "WzEsICJ4IiwgWyJhdWRpdCIsICIiXV0"}, "page_token"),
]


async def test_bad_fields_are_named_and_nothing_is_changed(admin: Admin) -> None:
    before = await admin.store.list_audit(target=None, before=None, limit=99)
    named = []
    for name, fields, _ in BAD_FIELDS:
        failure = await admin.failure(name, **fields)
        assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"), (name, fields)
        named.append((name, fields, failure.violations[0].field))
    assert [it[2] for it in named] == [it[2] for it in BAD_FIELDS]
    assert await admin.store.list_audit(target=None, before=None, limit=99) == before


async def pages(call: Callable[[str], Any], field: str, key: Callable[[Any], str]) -> list[str]:
    found: list[str] = []
    token = ""
    while True:
        page = await call(token)
        assert len(getattr(page, field)) <= 2
        found += [key(item) for item in getattr(page, field)]
        token = page.next_page_token
        if not token:
            return found


async def test_lists_are_paged_and_a_token_serves_its_own_list_only(admin: Admin) -> None:
    keys = [await add_key(admin.store, name) for name in ("b", "c", "b", "c")]
    tenants = await pages(
        lambda token: admin.call("ListTenants", page_size=2, page_token=token), "tenants", lambda it: it.tenant_id
    )
    assert tenants == ["admin", "b", "c", "tenant"]
    listed = await pages(
        lambda token: admin.call("ListKeys", page_size=2, page_token=token), "keys", lambda it: it.prefix
    )
    assert listed == [it.split("-")[2] for it in (*keys[::-1], admin.key, admin.gateway.key)]
    audit = await pages(
        lambda token: admin.call("ListAudit", page_size=2, page_token=token), "entries", lambda it: it.target
    )
    assert len(audit) == 10
    token = (await admin.call("ListKeys", tenant_id="b", page_size=1)).next_page_token
    for name, fields in (("ListKeys", {"tenant_id": "c"}), ("ListTenants", {}), ("ListAudit", {})):
        failure = await admin.failure(name, page_token=token, **fields)
        assert failure.violations[0].field == "page_token"


async def test_usage_is_summed_as_asked(admin: Admin) -> None:
    for name, tokens in (("a", 1), ("b", 2), ("b", 3)):
        record = await submitted(admin.store, tenant_id=name)
        await admin.store.finish_many([end_of_queued(record)], now=NOW - timedelta(seconds=tokens))
    usage = await admin.call("GetUsage", group_by=[admin_pb2.USAGE_DIMENSION_TENANT, admin_pb2.USAGE_DIMENSION_STATE])
    assert [(list(row.group), row.generations, row.prompt_tokens) for row in usage.rows] == [
        (["a", "CANCELLED"], 1, 3),
        (["b", "CANCELLED"], 2, 6),
    ]
    [row] = (await admin.call("GetUsage", tenant_id="b", since_time=timestamp(NOW - timedelta(seconds=2)))).rows
    assert (list(row.group), row.generations) == ([], 1)
    [row] = (await admin.call("GetUsage", until_time=PAST, since_time=Timestamp())).rows
    assert row == admin_pb2.UsageRow()


async def test_changes_are_written_down_with_who_made_them_and_without_secrets(admin: Admin) -> None:
    with structlog.testing.capture_logs() as logs:
        await admin.call("CreateTenant", tenant=admin_pb2.Tenant(tenant_id="team-a"))
        made = await admin.call("CreateKey", tenant_id="team-a", is_admin=True)
        rotated = await admin.call("RotateKey", key_id=made.key.key_id)
        await admin.call("UpdateKey", key_id=rotated.key.key_id, name="x")
        await admin.call("RevokeKey", key_id=rotated.key.key_id)
        entries = (await admin.call("ListAudit")).entries
    mine = await admin.store.find_key(admin.key.split("-")[2])
    assert mine is not None
    done = ["key.revoke", "key.update", "key.rotate", "key.create", "tenant.create"]
    assert [entry.action for entry in entries[:5]] == done
    assert {entry.actor for entry in entries[:5]} == {f"key:{mine.key_id}"}
    events = [log["event"] for log in logs if log["event"].startswith(("key_", "tenant_"))]
    assert events == ["tenant_created", "key_created", "key_rotated", "key_updated", "key_revoked"]
    shown = str(entries) + str(logs)
    for secret in (admin.key, made.secret, rotated.secret):
        assert secret.split("-", 3)[3] not in shown
