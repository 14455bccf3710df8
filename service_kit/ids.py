"""Identifiers, and how the time-ordered ones are made."""

from datetime import UTC, datetime
from typing import NewType
from uuid import UUID

import uuid6

GenerationId = NewType("GenerationId", str)
"""UUIDv7 in canonical text form; sorts by creation time, and the tables are partitioned by it."""
SessionId = NewType("SessionId", str)
"""UUIDv7 of one worker incarnation, engine process included."""
TenantId = NewType("TenantId", str)
KeyId = NewType("KeyId", str)
RequestId = NewType("RequestId", str)
"""The client's idempotency key, unique per tenant."""
SchedulerId = NewType("SchedulerId", str)
GatewayId = NewType("GatewayId", str)


def new_generation_id() -> GenerationId:
    return GenerationId(str(uuid6.uuid7()))


def new_session_id() -> SessionId:
    return SessionId(str(uuid6.uuid7()))


def minted_at(generation_id: GenerationId) -> datetime:
    """The moment in the id: its first 48 bits are Unix milliseconds (RFC 9562)."""
    return datetime.fromtimestamp((UUID(generation_id).int >> 80) / 1000, tz=UTC)


def is_generation_id(text: str) -> bool:
    """Whether `text` can name a generation at all: a UUID in canonical form. Others are unknown ids, not errors."""
    try:
        return str(UUID(text)) == text
    except ValueError:
        return False
