"""Port of the store for what is kept only for a time. Pure.

All methods take small batches, skip rows that others hold, and may run in several processes at once. They raise
`StoreUnavailableError` when the store cannot be reached. Usage, dead letters and the record of administration are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol

from service_kit.ids import GenerationId


@dataclass(frozen=True, slots=True, kw_only=True)
class UnstoredTexts:
    """An ended generation that is not stored and still has its texts."""

    generation_id: GenerationId
    finished_at: datetime
    grace: timedelta | None
    """Of its delivery; None is unlimited."""


class RetentionStore(Protocol):
    """Deletes what is over. Which rows that are is stated in each WHERE, so a caller that is late deletes nothing else."""

    async def unstored_page(
        self, *, after: GenerationId | None, kept: timedelta, limit: int, now: datetime | None = None
    ) -> list[UnstoredTexts]:
        """Generations with ids above `after`, by id, that are not stored, ended at least `kept` ago, and have texts."""

    async def delete_texts_many(self, generation_ids: Sequence[GenerationId], *, now: datetime | None = None) -> int:
        """Deletes prompt, output and stop strings of those that have ended and are not stored; returns of how many. The
        rows, their token counts and their ledger rows stay. Idempotent."""

    async def ended_many(self, generation_ids: Sequence[GenerationId]) -> list[GenerationId]:
        """Those of them that have ended, by id."""

    async def prune_sessions(self, *, kept: timedelta, limit: int, now: datetime | None = None) -> int:
        """Deletes sessions that are over, whose lease ended at least `kept` ago and that no RUNNING row names; returns
        how many."""
