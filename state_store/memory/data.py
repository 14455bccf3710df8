"""The shared state of the in-memory store, and the helpers its three parts need."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from service_kit.delta import Cursor, Delta, join
from service_kit.ids import GenerationId, KeyId, RequestId, SessionId, TenantId
from state_store.decisions import is_grantable
from state_store.model import (
    AttemptRecord,
    DeadLetter,
    GenerationRecord,
    LedgerRow,
    SessionRecord,
    State,
)
from state_store.tenants import ApiKey, AuditEntry, Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestKey:
    """What a tenant's request id stands for; it expires only after the generation's end."""

    generation_id: GenerationId
    request_hash: bytes
    expires_at: datetime | None = None


@dataclass(slots=True, kw_only=True)
class MemoryData:
    """The tables."""

    generations: dict[GenerationId, GenerationRecord] = field(default_factory=dict)
    queued_at: dict[GenerationId, datetime] = field(default_factory=dict)
    request_keys: dict[tuple[TenantId, RequestId], RequestKey] = field(default_factory=dict)
    attempts: dict[GenerationId, list[AttemptRecord]] = field(default_factory=dict)
    chunks: dict[GenerationId, list[Delta]] = field(default_factory=dict)
    ledger: dict[GenerationId, LedgerRow] = field(default_factory=dict)
    dead_letters: dict[GenerationId, DeadLetter] = field(default_factory=dict)
    sessions: dict[SessionId, SessionRecord] = field(default_factory=dict)
    tenants: dict[TenantId, Tenant] = field(default_factory=dict)
    keys: dict[KeyId, ApiKey] = field(default_factory=dict)
    audit: list[AuditEntry] = field(default_factory=list)


def system_clock() -> datetime:
    return datetime.now(UTC)


class MemoryPart:
    """Base of the parts. No method awaits anything, so each call is atomic within the event loop."""

    def __init__(self, *, clock: Callable[[], datetime] = system_clock, data: MemoryData | None = None) -> None:
        self._clock = clock
        self._data = data if data is not None else MemoryData()

    def _at(self, now: datetime | None) -> datetime:
        return now if now is not None else self._clock()

    def _put(self, record: GenerationRecord) -> GenerationRecord:
        self._data.generations[record.generation_id] = record
        return record

    def _by_id(self) -> list[GenerationRecord]:
        return [self._data.generations[generation_id] for generation_id in sorted(self._data.generations)]

    def _page(self, after: GenerationId | None) -> list[GenerationRecord]:
        return [record for record in self._by_id() if after is None or record.generation_id > after]

    def _running_of(self, session_id: SessionId) -> list[GenerationRecord]:
        return [record for record in self._by_id() if record.state is State.RUNNING and record.session_id == session_id]

    def _stored(self, generation_id: GenerationId) -> Delta | None:
        return join(self._data.chunks.get(generation_id, []))

    def _stored_end(self, generation_id: GenerationId) -> Cursor:
        chunks = self._data.chunks.get(generation_id)
        return chunks[-1].end if chunks else Cursor()

    def _find_attempt(self, generation_id: GenerationId, attempt: int) -> AttemptRecord | None:
        attempts = self._data.attempts.get(generation_id, [])
        return attempts[attempt - 1] if 1 <= attempt <= len(attempts) else None

    def _put_attempt(self, attempt: AttemptRecord) -> None:
        self._data.attempts[attempt.generation_id][attempt.attempt - 1] = attempt

    def _requeue_or_leave(self, record: GenerationRecord, now: datetime) -> tuple[GenerationRecord, bool]:
        """The RUNNING row after its attempt was lost, and whether it was requeued."""
        if not is_grantable(record):
            return record, False
        attempt = self._find_attempt(record.generation_id, record.attempt)
        assert attempt is not None
        if attempt.ended_at is None:
            self._put_attempt(replace(attempt, ended_at=now))
        self._data.queued_at[record.generation_id] = now
        return self._put(replace(record, state=State.QUEUED, session_id=None)), True
