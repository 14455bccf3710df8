"""Bytes of queue entries (msgpack). Pure. The scripts read fields 1 to 5 and 10; times are in ms for them, in µs for us."""

from datetime import UTC, datetime, timedelta

import msgpack  # type: ignore[import-untyped]

from scheduler.queue.port import QueueEntry
from service_kit.ids import GenerationId, TenantId
from state_store.model import ModelKey, PriorityClass

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NEVER = 0


def to_ms(time: datetime) -> int:
    """Whole ms since 1970, rounded down."""
    return (time - _EPOCH) // timedelta(milliseconds=1)


def pack_entry(entry: QueueEntry) -> bytes:
    deadline_at = entry.deadline_at
    fields = (
        entry.attempt,
        entry.priority_class.rank,
        entry.max_tokens,
        to_ms(entry.arrived_at),
        _NEVER if deadline_at is None else to_ms(deadline_at),
        entry.prompt_tokens,
        entry.tenant_id,
        _to_us(entry.arrived_at),
        None if deadline_at is None else _to_us(deadline_at),
        int(entry.is_charged),
    )
    return bytes(msgpack.packb(fields))


def unpack_entry(model_key: ModelKey, generation_id: bytes, packed: bytes) -> QueueEntry:
    fields = msgpack.unpackb(packed)
    attempt, rank, max_tokens, _, _, prompt_tokens, tenant_id, arrived_us, deadline_us, *charged = fields
    return QueueEntry(
        generation_id=GenerationId(generation_id.decode()),
        attempt=attempt,
        model_key=model_key,
        tenant_id=TenantId(tenant_id),
        priority_class=PriorityClass.from_rank(rank),
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        arrived_at=_from_us(arrived_us),
        deadline_at=None if deadline_us is None else _from_us(deadline_us),
        is_charged=charged == [1],
    )


def _to_us(time: datetime) -> int:
    return (time - _EPOCH) // timedelta(microseconds=1)


def _from_us(us: int) -> datetime:
    return _EPOCH + timedelta(microseconds=us)
