"""Bytes of queue entries (msgpack) and the units the queue counts in. Pure.

Times are whole µs since 1970 and charges whole millionths of a token, so that the scripts, whose numbers are doubles, and
the memory twin compute exactly the same.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from urllib.parse import quote, unquote

import msgpack  # type: ignore[import-untyped]

from scheduler.queue.port import OutputCharge, QueueEntry
from service_kit.ids import GenerationId, TenantId
from state_store.model import ModelKey, PriorityClass

UNITS_PER_TOKEN = 1_000_000
NEVER = 0
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def to_us(time: datetime) -> int:
    """Whole µs since 1970."""
    return (time - _EPOCH) // _MICROSECOND


def duration_us(duration: timedelta) -> int:
    return duration // _MICROSECOND


def cost_of(tokens: int, weight: float) -> int:
    """What `tokens` add to the counter of a tenant of this weight."""
    return round(tokens * UNITS_PER_TOKEN / weight)


def pop_cost_of(entry: QueueEntry) -> int:
    """What popping the entry charges: its prompt, once."""
    return cost_of(entry.prompt_tokens, entry.weight) if entry.attempt == 0 else 0


def tenant_name(tenant_id: TenantId) -> str:
    """The tenant in keys and members: ASCII without braces or colons, so that no id can leave its model's hash slot or
    stand for another structure. Ties between tenants go by it."""
    return quote(tenant_id, safe="")


def charge_costs_of(charges: Sequence[OutputCharge]) -> dict[ModelKey, dict[str, int]]:
    """What each tenant's counter grows by, by model; the first to be named is charged first."""
    costs: dict[ModelKey, dict[str, int]] = {}
    for charge in charges:
        of_model, tenant = costs.setdefault(charge.model_key, {}), tenant_name(charge.tenant_id)
        of_model[tenant] = of_model.get(tenant, 0) + cost_of(charge.tokens, charge.weight)
    return costs


def pack_entry(entry: QueueEntry) -> bytes:
    """An array; the scripts read all fields but the last."""
    fields = (
        entry.attempt,
        entry.priority_class.rank,
        int(entry.is_charged),
        tenant_name(entry.tenant_id),
        pop_cost_of(entry),
        entry.prompt_tokens,
        entry.max_tokens,
        to_us(entry.order_at),
        to_us(entry.arrived_at),
        _optional_us(entry.deadline_at),
        _optional_us(entry.ready_at),
        float(entry.weight),
    )
    return bytes(msgpack.packb(fields))


def unpack_entry(model_key: ModelKey, generation_id: bytes, packed: bytes) -> QueueEntry:
    """The inverse of `pack_entry`."""
    attempt, rank, charged, tenant, _, prompt, tokens, order, arrived, deadline, ready, weight = msgpack.unpackb(packed)
    return QueueEntry(
        generation_id=GenerationId(generation_id.decode()),
        attempt=attempt,
        model_key=model_key,
        tenant_id=TenantId(unquote(tenant)),
        weight=weight,
        priority_class=PriorityClass.from_rank(rank),
        prompt_tokens=prompt,
        max_tokens=tokens,
        arrived_at=_from_us(arrived),
        order_at=_from_us(order),
        deadline_at=_optional_time(deadline),
        ready_at=_optional_time(ready),
        is_charged=charged == 1,
    )


def pack_model(model_key: ModelKey) -> bytes:
    return bytes(msgpack.packb((model_key.revision, model_key.precision)))


def unpack_model(packed: bytes) -> ModelKey:
    revision, precision = msgpack.unpackb(packed)
    return ModelKey(revision=revision, precision=precision)


def _optional_us(time: datetime | None) -> int:
    return NEVER if time is None else to_us(time)


def _optional_time(us: int) -> datetime | None:
    return None if us == NEVER else _from_us(us)


def _from_us(us: int) -> datetime:
    return _EPOCH + timedelta(microseconds=us)
