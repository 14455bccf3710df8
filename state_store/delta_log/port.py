"""The live delta log: per generation an append-only list of numbered tokens, fenced by attempt.

Per generation the log keeps: attempt, is_open, base, end, and the deltas between base and end. Only the operations below
write it. They are atomic per item; a list is one round trip per shard. All raise `LogUnavailableError` when the log
cannot be reached: then it is not known what was written, and repeating the call is safe.

Why it is fenced: a paused scheduler may append tokens 51-53 of attempt 1 after attempt 2 was told to start at 51. If
appends were only checked for gaps, attempt 2's 51-53 would count as repeats and its 54 would follow: no error, wrong text.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Protocol

from service_kit.delta import Cursor, Delta
from service_kit.ids import GatewayId, GenerationId
from service_kit.sampling import FinishReason
from state_store.model import GenerationRecord, State


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEnd:
    """Final state as readers need it; written by `seal_many` after the commit, never before."""

    state: State
    output_tokens: int
    prompt_tokens: int
    cached_prompt_tokens: int
    finish_reason: FinishReason | None = None
    matched_stop: str | None = None
    error_reason: str | None = None
    error_message: str | None = None

    @classmethod
    def of(cls, record: GenerationRecord) -> "LogEnd":
        """The end that a final row says."""
        return cls(
            state=record.state,
            output_tokens=record.output_tokens,
            prompt_tokens=record.num_prompt_tokens,
            cached_prompt_tokens=record.cached_prompt_tokens,
            finish_reason=record.finish_reason,
            matched_stop=record.matched_stop,
            error_reason=record.error_reason,
            error_message=record.error_message,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenItem:
    """Open the log for `attempt`. `base` is the end of the output stored in Postgres (chunk rows)."""

    generation_id: GenerationId
    attempt: int
    base: Cursor = Cursor()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenResult:
    """`is_opened` is False when the log has an equal or higher attempt; then nothing changed.

    `deltas` are all deltas between `base` and `end`. After data loss (no log, or one that ends before the requested base)
    the log starts anew at the requested base, without deltas.
    """

    is_opened: bool
    attempt: int
    base: Cursor
    end: Cursor
    deltas: tuple[Delta, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendItem:
    generation_id: GenerationId
    attempt: int
    delta: Delta


class AppendStatus(StrEnum):
    OK = "OK"
    DUP = "DUP"
    """All of it was appended before, by this same attempt (or it lies before this attempt's start)."""
    GAP = "GAP"
    """It starts behind end + 1; `end` tells where to send from. A delta that overlaps the end is GAP as well: the sender
    sends again from end + 1."""
    STALE = "STALE"
    """The log is at a higher attempt, or this one is sealed. The sender must stop."""
    UNOPENED = "UNOPENED"
    """The log is at a lower attempt: the open of this one was lost."""
    ABSENT = "ABSENT"
    """There is no log; append never creates one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendResult:
    status: AppendStatus
    end: Cursor
    """End of the log afterwards; Cursor() when ABSENT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SealItem:
    """Close `attempt` and all below. `terminal` closes the log for good and starts its expiry (10 min)."""

    generation_id: GenerationId
    attempt: int
    terminal: LogEnd | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogView:
    """What the log knows. `deltas` are those that end behind the asked cursor, in order."""

    generation_id: GenerationId
    is_present: bool
    attempt: int = 0
    is_open: bool = False
    base: Cursor = Cursor()
    end: Cursor = Cursor()
    deltas: tuple[Delta, ...] = ()
    terminal: LogEnd | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """News of one generation for a watching gateway; a hint, to be verified against the reader's cursor.

    An append pushes its delta; an open pushes the attempt and the end; a terminal seal pushes the terminal.
    """

    generation_id: GenerationId
    attempt: int
    end: Cursor
    delta: Delta | None = None
    terminal: LogEnd | None = None


class DeltaLogWriter(Protocol):
    """Used by schedulers only."""

    async def open_many(self, items: Sequence[OpenItem]) -> list[OpenResult]:
        """Refuses attempts at or below the log's; otherwise sets the attempt, opens it and returns what it continues."""

    async def append_many(self, items: Sequence[AppendItem]) -> list[AppendResult]:
        """Appends and pushes. Needs the log to be open at exactly this attempt. Several items of one generation in one
        call are applied in order."""

    async def seal_many(self, items: Sequence[SealItem]) -> list[LogView]:
        """Closes the attempts (a log that is at a higher attempt is left as it is, unless terminal is set) and returns
        the views without deltas. On an absent log it only pushes the terminal to the watchers, and forgets
        them. Idempotent."""

    async def drop_many(self, generation_ids: Sequence[GenerationId]) -> None:
        """Deletes logs and watchers ahead of their expiry. Only for generations whose row is final. Idempotent."""

    async def unsealed_page(self, place: int, *, limit: int) -> tuple[list[GenerationId], int]:
        """Some of the generations whose log has no terminal, or that are watched without having a log, and the place to go
        on from; a round begins and ends with place 0. What is so during the whole round is named at least once. Looks at
        about `limit` keys."""

    async def read_many(self, items: Sequence[tuple[GenerationId, int]]) -> list[LogView]:
        """Views with the deltas that end behind each stated sequence number; watches nothing."""

    async def last_watched_many(self, generation_ids: Sequence[GenerationId]) -> list[datetime | None]:
        """When each was last watched: now for one with a live watcher, else the latest lease end or unwatch; None when
        nobody ever did (or the log's store lost it; see `kept_since`)."""

    async def kept_since(self) -> datetime:
        """Since when the log keeps what it is told: the moment of the first call after it began, or was emptied. To judge
        by an answer of `last_watched_many`, ask this after it."""


class DeltaLogReader(Protocol):
    """Used by gateways only."""

    async def attach_many(self, gateway_id: GatewayId, items: Sequence[tuple[GenerationId, int]]) -> list[LogView]:
        """Registers the gateway as a watcher (leased, 15 s) and returns everything behind each cursor in one atomic step:
        what is not in the answer will be pushed. Also on an absent log."""

    async def read_many(self, items: Sequence[tuple[GenerationId, int]]) -> list[LogView]: ...

    async def watch_many(self, gateway_id: GatewayId, generation_ids: Sequence[GenerationId]) -> None:
        """Refreshes watch leases."""

    async def unwatch_many(self, gateway_id: GatewayId, generation_ids: Sequence[GenerationId]) -> None:
        """Ends watching now, so that grace runs from now."""

    def subscribe(self, gateway_id: GatewayId) -> AsyncIterator[Sequence[Push] | None]:
        """Endless pushes for this gateway. None first, when the subscription stands, and again after every reconnect:
        pushes may have been missed, attach again for all. Reconnects by itself with back-off."""
