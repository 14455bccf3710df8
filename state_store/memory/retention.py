"""What is kept only for a time, in memory."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from service_kit.ids import GenerationId
from state_store.memory.data import MemoryPart
from state_store.model import GenerationRecord, SessionState
from state_store.retention_store import UnstoredTexts


class MemoryRetention(MemoryPart):
    """RetentionStore."""

    async def unstored_page(
        self, *, after: GenerationId | None, kept: timedelta, limit: int, now: datetime | None = None
    ) -> list[UnstoredTexts]:
        latest = self._at(now) - kept
        found = [
            UnstoredTexts(generation_id=record.generation_id, finished_at=record.finished_at, grace=record.grace)
            for record in self._page(after)
            if _has_texts_to_delete(record) and record.finished_at is not None and record.finished_at <= latest
        ]
        return found[:limit]

    async def delete_texts_many(self, generation_ids: Sequence[GenerationId], *, now: datetime | None = None) -> int:
        records = [self._data.generations.get(generation_id) for generation_id in dict.fromkeys(generation_ids)]
        over = [record for record in records if record is not None and _has_texts_to_delete(record)]
        for record in over:
            self._data.chunks.pop(record.generation_id, None)
            self._put(
                replace(
                    record,
                    texts_deleted_at=self._at(now),
                    deleted_prompt_tokens=record.num_prompt_tokens,
                    prompt_token_ids=(),
                    sampling=replace(record.sampling, stop=()),
                    matched_stop=None,
                )
            )
        return len(over)

    async def ended_many(self, generation_ids: Sequence[GenerationId]) -> list[GenerationId]:
        records = [self._data.generations.get(generation_id) for generation_id in sorted(set(generation_ids))]
        return [record.generation_id for record in records if record is not None and record.state.is_terminal]

    async def prune_sessions(self, *, kept: timedelta, limit: int, now: datetime | None = None) -> int:
        latest = self._at(now) - kept
        over = [
            session_id
            for session_id, session in sorted(self._data.sessions.items())
            if session.state is not SessionState.LIVE
            and session.lease_expires_at <= latest
            and not self._running_of(session_id)
        ]
        for session_id in over[:limit]:
            del self._data.sessions[session_id]
        return len(over[:limit])


def _has_texts_to_delete(record: GenerationRecord) -> bool:
    return record.state.is_terminal and not record.is_stored and record.texts_deleted_at is None
