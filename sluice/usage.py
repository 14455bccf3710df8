"""What was used, summed over the ledger: read from the database, or asked of a gateway with an admin key."""

import contextlib
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc

from inference.v1 import admin_pb2, admin_pb2_grpc
from service_kit.errors import UnavailableError
from service_kit.grpc_client import open_channel
from service_kit.rpc_status import parse_rpc_error, to_error
from sluice.client import ClientSettings
from sluice.errors import UserError
from sluice.keys import parse_tenant
from sluice.listing import Value
from sluice.times import parse_since
from state_store.tenant_store import UsageDimension, UsageQuery, UsageRow

SUMS = ("generations", "prompt_tokens", "cached_prompt_tokens", "output_tokens")
_CALL_TIMEOUT_S = 30.0
_DEFAULT_SPAN = timedelta(days=30)


def parse_query(
    *, tenant: str | None, since: str | None, until: str | None, group_by: str, now: datetime
) -> UsageQuery:
    """Raises UserError."""
    end = parse_since(until, now, "--until") if until is not None else now
    start = parse_since(since, now) if since is not None else now - _DEFAULT_SPAN
    if start >= end:
        raise UserError("--since must be before --until")
    return UsageQuery(
        tenant_id=parse_tenant(tenant) if tenant is not None else None,
        since=start,
        until=end,
        group_by=_parse_dimensions(group_by),
    )


def usage_fields(query: UsageQuery, row: UsageRow) -> dict[str, Value]:
    groups = {dimension.value: value for dimension, value in zip(query.group_by, row.group, strict=True)}
    return {**groups, **{name: getattr(row, name) for name in SUMS}}


async def ask_gateway(settings: ClientSettings, query: UsageQuery) -> list[UsageRow]:
    """The first of the gateways that answers. Raises SluiceError."""
    request = admin_pb2.GetUsageRequest(
        tenant_id=query.tenant_id or "",
        group_by=[admin_pb2.UsageDimension.Value(f"USAGE_DIMENSION_{it.name}") for it in query.group_by],
    )
    request.since_time.FromDatetime(query.since.astimezone(UTC))
    request.until_time.FromDatetime(query.until.astimezone(UTC))
    for target in settings.targets[:-1]:
        with contextlib.suppress(UnavailableError):  # the next one may be there
            return await _ask(target, settings, request)
    return await _ask(settings.targets[-1], settings, request)


async def _ask(target: str, settings: ClientSettings, request: admin_pb2.GetUsageRequest) -> list[UsageRow]:
    channel = open_channel(target, tls=settings.tls)
    stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
    metadata = (("authorization", f"Bearer {settings.api_key}"),)
    try:
        answer = await stub.GetUsage(request, metadata=metadata, timeout=_CALL_TIMEOUT_S)
    except grpc.RpcError as error:
        raise to_error(parse_rpc_error(error)) from None
    finally:
        await channel.close(None)
    return [
        UsageRow(
            group=tuple(row.group),
            generations=row.generations,
            prompt_tokens=row.prompt_tokens,
            cached_prompt_tokens=row.cached_prompt_tokens,
            output_tokens=row.output_tokens,
        )
        for row in answer.rows
    ]


def _parse_dimensions(text: str) -> tuple[UsageDimension, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = {dimension.value: dimension for dimension in UsageDimension}
    unknown = [name for name in names if name not in known]
    if unknown or len(set(names)) != len(names):
        raise UserError(f"--group-by {text!r}: give some of {', '.join(known)}, each once, separated by commas")
    return tuple(known[name] for name in names)
