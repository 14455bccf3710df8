"""Deleting in small batches what is kept only for a time. Whole days of rows go with their partitions (partitions.py)."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from service_kit.ids import GenerationId
from state_store.postgres.attempts import known_ids
from state_store.postgres.pool import PostgresPart
from state_store.retention_store import UnstoredTexts

_LOWEST_ID = "00000000-0000-0000-0000-000000000000"

UNSTORED_PAGE = """
SELECT g.generation_id, g.finished_at, g.grace FROM generations g
WHERE NOT g.is_stored AND g.texts_deleted_at IS NULL AND g.generation_id > %(after)s::uuid
    AND g.finished_at <= coalesce(%(now)s::timestamptz, now()) - %(kept)s::interval
ORDER BY g.generation_id LIMIT %(limit)s
"""
DELETE_TEXTS = """
WITH over AS MATERIALIZED (
    SELECT g.generation_id FROM generations g
    WHERE g.generation_id = ANY(%(generation_ids)s::uuid[]) AND NOT g.is_stored AND g.texts_deleted_at IS NULL
        AND g.finished_at IS NOT NULL
    ORDER BY g.generation_id FOR NO KEY UPDATE SKIP LOCKED
), emptied AS (
    UPDATE generations g
    SET texts_deleted_at = coalesce(%(now)s::timestamptz, now()), deleted_prompt_tokens = octet_length(g.prompt_token_ids) / 4, prompt_token_ids = '',
        sampling = jsonb_set(g.sampling, '{stop}', '[]'), matched_stop = NULL
    FROM over WHERE g.generation_id = over.generation_id AND g.generation_id = ANY(%(generation_ids)s::uuid[])
), chunks_gone AS (
    DELETE FROM chunks c USING over
    WHERE c.generation_id = over.generation_id AND c.generation_id = ANY(%(generation_ids)s::uuid[])
)
SELECT generation_id FROM over
"""
ENDED = """
SELECT g.generation_id FROM generations g
WHERE g.generation_id = ANY(%(generation_ids)s::uuid[]) AND g.finished_at IS NOT NULL ORDER BY g.generation_id
"""
PRUNE_SESSIONS = """
WITH over AS MATERIALIZED (
    SELECT s.session_id FROM worker_sessions s
    WHERE s.state <> 'LIVE' AND s.lease_expires_at <= coalesce(%(now)s::timestamptz, now()) - %(kept)s::interval
        AND NOT EXISTS (SELECT FROM generations g WHERE g.state = 'RUNNING' AND g.session_id = s.session_id)
    ORDER BY s.session_id LIMIT %(limit)s FOR UPDATE SKIP LOCKED
)
DELETE FROM worker_sessions s USING over WHERE s.session_id = over.session_id RETURNING s.session_id
"""


class PostgresRetention(PostgresPart):
    """RetentionStore."""

    async def unstored_page(
        self, *, after: GenerationId | None, kept: timedelta, limit: int, now: datetime | None = None
    ) -> list[UnstoredTexts]:
        parameters = {"after": after or _LOWEST_ID, "kept": kept, "limit": limit, "now": now}
        return [
            UnstoredTexts(
                generation_id=GenerationId(str(row["generation_id"])),
                finished_at=row["finished_at"],
                grace=row["grace"],
            )
            for row in await self._database.fetch(UNSTORED_PAGE, parameters)
        ]

    async def delete_texts_many(self, generation_ids: Sequence[GenerationId], *, now: datetime | None = None) -> int:
        ids = known_ids(generation_ids)
        if not ids:
            return 0
        return len(await self._database.fetch(DELETE_TEXTS, {"generation_ids": ids, "now": now}))

    async def ended_many(self, generation_ids: Sequence[GenerationId]) -> list[GenerationId]:
        found = await self._database.fetch(ENDED, {"generation_ids": known_ids(generation_ids)})
        return [GenerationId(str(row["generation_id"])) for row in found]

    async def prune_sessions(self, *, kept: timedelta, limit: int, now: datetime | None = None) -> int:
        return len(await self._database.fetch(PRUNE_SESSIONS, {"kept": kept, "limit": limit, "now": now}))
