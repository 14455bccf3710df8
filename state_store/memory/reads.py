"""Generations in memory: every read, and the pruning of request keys."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from service_kit.delta import Cursor, Delta
from service_kit.ids import GenerationId, RequestId, TenantId
from state_store.decisions import is_grantable, overdue_cause
from state_store.memory.data import MemoryPart
from state_store.model import (
    AttemptRecord,
    CancelCause,
    DeadLetter,
    GenerationRecord,
    GenerationSummary,
    LedgerRow,
    State,
)
from state_store.ports import ALL_DEAD_LETTERS, DeadLetterFilter


class MemoryGenerationReads(MemoryPart):
    """The reading half of GenerationStore."""

    async def read_output_many(self, generation_ids: Sequence[GenerationId]) -> list[Delta | None]:
        return [self._stored(generation_id) for generation_id in generation_ids]

    async def stored_ends_many(self, generation_ids: Sequence[GenerationId]) -> list[Cursor]:
        return [self._stored_end(generation_id) for generation_id in generation_ids]

    async def get_many(self, generation_ids: Sequence[GenerationId]) -> list[GenerationRecord | None]:
        return [self._data.generations.get(generation_id) for generation_id in generation_ids]

    async def find_by_request_id(self, tenant_id: TenantId, request_id: RequestId) -> GenerationRecord | None:
        key = self._data.request_keys.get((tenant_id, request_id))
        if key is None or (key.expires_at is not None and key.expires_at < self._clock()):
            return None
        return self._data.generations[key.generation_id]

    async def list_page(
        self, tenant_id: TenantId, *, states: Sequence[State], before: GenerationId | None, limit: int
    ) -> list[GenerationSummary]:
        found = [
            record
            for record in reversed(self._by_id())
            if record.tenant_id == tenant_id
            and (not states or record.state in states)
            and (before is None or record.generation_id < before)
        ]
        return _summaries(found[:limit])

    async def queued_page(
        self, *, after: GenerationId | None, min_age: timedelta, limit: int, now: datetime | None = None
    ) -> list[GenerationSummary]:
        latest = self._at(now) - min_age
        found = [
            record
            for record in self._page(after)
            if record.state is State.QUEUED and self._data.queued_at[record.generation_id] <= latest
        ]
        return _summaries(found[:limit])

    async def overdue_page(
        self, *, after: GenerationId | None, limit: int, now: datetime | None = None
    ) -> list[tuple[GenerationId, CancelCause]]:
        found = [
            (record.generation_id, cause)
            for record in self._page(after)
            if not record.state.is_terminal
            and record.cancel_cause is None
            and (cause := overdue_cause(record, self._at(now))) is not None
        ]
        return found[:limit]

    async def cancelled_queued_page(self, *, after: GenerationId | None, limit: int) -> list[GenerationSummary]:
        found = [record for record in self._page(after) if record.state is State.QUEUED and not is_grantable(record)]
        return _summaries(found[:limit])

    async def unwatchable_page(self, *, after: GenerationId | None, limit: int) -> list[tuple[GenerationId, timedelta]]:
        found = [
            (record.generation_id, record.grace)
            for record in self._page(after)
            if not record.state.is_terminal and record.cancel_cause is None and record.grace is not None
        ]
        return found[:limit]

    async def attempts_of(self, generation_id: GenerationId) -> list[AttemptRecord]:
        return list(self._data.attempts.get(generation_id, []))

    async def ledger_of(self, generation_id: GenerationId) -> list[LedgerRow]:
        row = self._data.ledger.get(generation_id)
        return [row] if row is not None else []

    async def dead_letters(self, *, limit: int, wanted: DeadLetterFilter = ALL_DEAD_LETTERS) -> list[DeadLetter]:
        found = [
            it
            for it in self._data.dead_letters.values()
            if wanted.generation_id in (None, it.generation_id)
            and wanted.tenant_id in (None, it.tenant_id)
            and wanted.reason in (None, it.reason)
            and (wanted.since is None or it.created_at >= wanted.since)
        ]
        letters = sorted(found, key=lambda it: (it.created_at, it.generation_id))
        return letters[::-1][:limit]

    async def prune_request_keys(self, *, limit: int, now: datetime | None = None) -> int:
        at = self._at(now)
        over = [
            name for name, key in self._data.request_keys.items() if key.expires_at is not None and key.expires_at < at
        ]
        for name in over[:limit]:
            del self._data.request_keys[name]
        return len(over[:limit])


def _summaries(records: Sequence[GenerationRecord]) -> list[GenerationSummary]:
    return [GenerationSummary.of(record) for record in records]
