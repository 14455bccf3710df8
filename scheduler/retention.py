"""Deletes what is kept only for a time: texts that were not to be stored, logs that nobody closed, dead sessions.

A loop of its own beside the reaper's: it works in small batches, one after the other, and what cannot be done now is done in a
later round. Every step may run on several schedulers.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol

from service_kit.errors import UnavailableError
from service_kit.ids import GenerationId
from service_kit.logging import get_logger
from state_store.delta_log.port import DeltaLogWriter
from state_store.model import GenerationRecord
from state_store.ports import GenerationStore
from state_store.retention_store import RetentionStore, UnstoredTexts

_log = get_logger()

BATCH = 100
LOG_KEYS = 1000


class Store(GenerationStore, RetentionStore, Protocol):
    """What the truth offers to retention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionSettings:
    """`log_kept` is how long the delta log outlives its generation's end: what is not stored is not kept longer than that,
    and at least for `shortest_kept`, in which its readers get the end. `sessions_kept` counts from the end of the lease."""

    log_kept: timedelta = timedelta(minutes=10)
    shortest_kept: timedelta = timedelta(seconds=15)
    sessions_kept: timedelta = timedelta(days=1)


_DEFAULT_SETTINGS = RetentionSettings()


class Retention:
    """`run_once` every few seconds. `close_logs` tells the readers of final rows that they are final."""

    def __init__(
        self,
        *,
        store: Store,
        log: DeltaLogWriter,
        close_logs: Callable[[Sequence[GenerationRecord]], Awaitable[None]],
        now: Callable[[], datetime],
        settings: RetentionSettings = _DEFAULT_SETTINGS,
    ) -> None:
        self._store = store
        self._log = log
        self._close_logs = close_logs
        self._now = now
        self._settings = settings
        self._place = 0

    async def run_once(self) -> None:
        """One round. A step that fails does not keep the others from running."""
        steps: list[Callable[[], Awaitable[None]]] = [
            self.delete_unstored_texts,
            self.close_forgotten_logs,
            self.prune_sessions,
        ]
        for step in steps:
            try:
                await step()
            except UnavailableError as error:
                _log.warning("retention_step_unavailable", step=step.__name__, reason=error.reason)
            except Exception:  # noqa: BLE001 - one bad row must not keep the other steps from running
                _log.exception("retention_step_failed", step=step.__name__)

    async def delete_unstored_texts(self) -> None:
        """The log first: a crash in between leaves the row to be found again."""
        shortest = min(self._settings.shortest_kept, self._settings.log_kept)
        after: GenerationId | None = None
        while page := await self._store.unstored_page(after=after, kept=shortest, limit=BATCH, now=self._now()):
            over = await self._find_over(page)
            if over:
                await self._log.drop_many(over)
                count = await self._store.delete_texts_many(over)
                _log.info("unstored_texts_deleted", count=count)
            after = page[-1].generation_id

    async def _find_over(self, page: Sequence[UnstoredTexts]) -> list[GenerationId]:
        now = self._now()  # before the question: who reads at this moment is watching later than that
        watched = await self._log.last_watched_many([item.generation_id for item in page])
        return [
            item.generation_id
            for item, last_watched_at in zip(page, watched, strict=True)
            if is_over(item, last_watched_at, settings=self._settings, now=now)
        ]

    async def close_forgotten_logs(self) -> None:
        """Logs of ended generations that were not closed, because their scheduler died or Redis was away between the commit
        and that: unclosed they would be kept as long as live ones are. With them who came to watch when the log was gone
        already. One page in each round."""
        unsealed, self._place = await self._log.unsealed_page(self._place, limit=LOG_KEYS)
        ended = await self._store.ended_many(unsealed) if unsealed else []
        for start in range(0, len(ended), BATCH):
            records = await self._store.get_many(ended[start : start + BATCH])
            await self._close_logs([record for record in records if record is not None])
        if ended:
            _log.info("forgotten_logs_closed", count=len(ended))

    async def prune_sessions(self) -> None:
        kept = self._settings.sessions_kept
        while await self._store.prune_sessions(kept=kept, limit=BATCH, now=self._now()) == BATCH:
            pass


def is_over(
    item: UnstoredTexts, last_watched_at: datetime | None, *, settings: RetentionSettings, now: datetime
) -> bool:
    """Whether the grace period has passed since the end, or since the last reader left, whichever is later; never before
    `shortest_kept` and always after `log_kept`, from the end."""
    age = now - item.finished_at
    if age > settings.log_kept:
        return True
    if age < settings.shortest_kept:
        return False
    grace = settings.log_kept if item.grace is None else item.grace
    unread_since = max(item.finished_at, last_watched_at or item.finished_at)
    return now > unread_since + grace
