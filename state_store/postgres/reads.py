"""Reading generations, and the pruning of request keys."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from service_kit.ids import GenerationId, RequestId, TenantId, is_generation_id
from state_store.decisions import overdue_cause
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
from state_store.postgres import rows, statements
from state_store.postgres.attempts import by_id, known_ids
from state_store.postgres.pool import Parameters, PostgresPart

_LOWEST_ID = "00000000-0000-0000-0000-000000000000"
_HIGHEST_ID = "ffffffff-ffff-ffff-ffff-ffffffffffff"

_ATTEMPTS_OF = """
SELECT generation_id, attempt, session_id, worker_id, nonce, granted_at, ended_at, outcome, end_position, is_charged
FROM attempts WHERE generation_id = %(generation_id)s::uuid ORDER BY attempt
"""
_LEDGER_OF = """
SELECT generation_id, tenant_id, key_id, model, priority_class, state, prompt_tokens, cached_prompt_tokens, output_tokens,
    finished_at
FROM usage_ledger WHERE generation_id = %(generation_id)s::uuid
"""
_DEAD_LETTERS = """
SELECT generation_id, tenant_id, reason, message, attempts, worker_ids, created_at
FROM dead_letters
WHERE (%(generation_id)s::uuid IS NULL OR generation_id = %(generation_id)s::uuid)
    AND (%(tenant_id)s::text IS NULL OR tenant_id = %(tenant_id)s)
    AND (%(reason)s::text IS NULL OR reason = %(reason)s)
    AND (%(since)s::timestamptz IS NULL OR created_at >= %(since)s)
ORDER BY created_at DESC, generation_id DESC LIMIT %(limit)s
"""
_PRUNE_REQUEST_KEYS = """
WITH over AS (
    SELECT tenant_id, request_id FROM request_keys WHERE expires_at < coalesce(%(now)s::timestamptz, now())
    ORDER BY expires_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED
)
DELETE FROM request_keys k USING over WHERE k.tenant_id = over.tenant_id AND k.request_id = over.request_id
RETURNING k.generation_id
"""


class PostgresReads(PostgresPart):
    """The reading part of GenerationStore."""

    async def get_many(self, generation_ids: Sequence[GenerationId]) -> list[GenerationRecord | None]:
        found = await self._database.fetch(statements.GET, {"generation_ids": known_ids(generation_ids)})
        records = by_id(found)
        return [records.get(generation_id) for generation_id in generation_ids]

    async def find_by_request_id(self, tenant_id: TenantId, request_id: RequestId) -> GenerationRecord | None:
        if "\x00" in request_id:
            return None
        parameters = {"tenant_ids": [tenant_id], "request_ids": [request_id], "now": None}
        found = await self._database.fetch(statements.FIND_BY_REQUEST_IDS, parameters)
        return rows.generation(found[0]) if found else None

    async def list_page(
        self, tenant_id: TenantId, *, states: Sequence[State], before: GenerationId | None, limit: int
    ) -> list[GenerationSummary]:
        parameters = {
            "tenant_id": tenant_id,
            "all_states": not states,
            "states": [state.value for state in states],
            "before": before or _HIGHEST_ID,
            "limit": limit,
        }
        return await self._summaries(statements.LIST_PAGE, parameters)

    async def queued_page(
        self, *, after: GenerationId | None, min_age: timedelta, limit: int, now: datetime | None = None
    ) -> list[GenerationSummary]:
        parameters = {"after": after or _LOWEST_ID, "min_age": min_age, "limit": limit, "now": now}
        return await self._summaries(statements.QUEUED_PAGE, parameters)

    async def overdue_page(
        self, *, after: GenerationId | None, limit: int, now: datetime | None = None
    ) -> list[tuple[GenerationId, CancelCause]]:
        parameters = {"after": after or _LOWEST_ID, "limit": limit, "now": now}
        found = await self._database.fetch(statements.OVERDUE_PAGE, parameters)
        judged = [(head := rows.overdue(row), overdue_cause(head, row["at"])) for row in found]
        return [(head.generation_id, cause) for head, cause in judged if cause is not None]

    async def cancelled_queued_page(self, *, after: GenerationId | None, limit: int) -> list[GenerationSummary]:
        return await self._summaries(statements.QUEUED_TO_END_PAGE, {"after": after or _LOWEST_ID, "limit": limit})

    async def unwatchable_page(self, *, after: GenerationId | None, limit: int) -> list[tuple[GenerationId, timedelta]]:
        found = await self._database.fetch(statements.GRACE_PAGE, {"after": after or _LOWEST_ID, "limit": limit})
        return [(GenerationId(str(row["generation_id"])), row["grace"]) for row in found]

    async def attempts_of(self, generation_id: GenerationId) -> list[AttemptRecord]:
        if not is_generation_id(generation_id):
            return []
        found = await self._database.fetch(_ATTEMPTS_OF, {"generation_id": generation_id})
        return [rows.attempt(row) for row in found]

    async def ledger_of(self, generation_id: GenerationId) -> list[LedgerRow]:
        if not is_generation_id(generation_id):
            return []
        found = await self._database.fetch(_LEDGER_OF, {"generation_id": generation_id})
        return [rows.ledger_row(row) for row in found]

    async def dead_letters(self, *, limit: int, wanted: DeadLetterFilter = ALL_DEAD_LETTERS) -> list[DeadLetter]:
        if wanted.generation_id is not None and not is_generation_id(wanted.generation_id):
            return []
        parameters: Parameters = {
            "generation_id": wanted.generation_id,
            "tenant_id": wanted.tenant_id,
            "reason": wanted.reason,
            "since": wanted.since,
            "limit": limit,
        }
        return [rows.dead_letter(row) for row in await self._database.fetch(_DEAD_LETTERS, parameters)]

    async def prune_request_keys(self, *, limit: int, now: datetime | None = None) -> int:
        return len(await self._database.fetch(_PRUNE_REQUEST_KEYS, {"limit": limit, "now": now}))

    async def _summaries(self, statement: str, parameters: Parameters) -> list[GenerationSummary]:
        return [rows.summary(row) for row in await self._database.fetch(statement, parameters)]
