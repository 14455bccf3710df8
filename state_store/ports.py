"""Ports of the store: what the rest of Sluice may ask of the durable record.

Every method is one transaction. Methods that take a list answer per item, in order; one bad item never fails the others.
All of them raise `StoreUnavailableError` when the store cannot be reached: then nothing is known about what happened, and
repeating the call is safe (each write states its precondition). Time is the database's clock; `now` replaces it in tests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Protocol

from service_kit.delta import Cursor, Delta
from service_kit.ids import GenerationId, RequestId, SessionId, TenantId
from state_store.model import (
    AttemptOutcome,
    AttemptRecord,
    CancelCause,
    DeadLetter,
    Finish,
    GenerationRecord,
    GenerationSummary,
    LedgerRow,
    NewGeneration,
    NewSession,
    SessionRecord,
    State,
)
from state_store.tenant_store import WeightStore


class SubmitKind(StrEnum):
    CREATED = "CREATED"
    EXISTING = "EXISTING"
    """The tenant has this request_id with the same hash; nothing was written."""
    CONFLICT = "CONFLICT"
    """The tenant has this request_id with another hash; nothing was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitResult:
    kind: SubmitKind
    record: GenerationRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantRequest:
    """Wish to run attempt `after_attempt + 1` of a queued generation on a session."""

    generation_id: GenerationId
    after_attempt: int
    session_id: SessionId
    owner_epoch: int
    nonce: int


class GrantKind(StrEnum):
    GRANTED = "GRANTED"
    NOT_QUEUED = "NOT_QUEUED"
    """Not QUEUED at that attempt, or its end was asked for: the queue entry is to be dropped."""
    FENCED = "FENCED"
    """The session is not LIVE under this epoch, or serves another model revision: the entry goes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantResult:
    kind: GrantKind
    record: GenerationRecord | None = None
    """The row after the grant; only when GRANTED."""


class FinishKind(StrEnum):
    FINISHED = "FINISHED"
    ALREADY_FINISHED = "ALREADY_FINISHED"
    """The row was final before; `record` says how. Nothing was written."""
    STALE = "STALE"
    """Another attempt or state: the caller no longer decides about it. Nothing was written."""
    INCOMPLETE = "INCOMPLETE"
    """Chunks and output do not reach output_tokens, or their chains differ. Nothing was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishResult:
    kind: FinishKind
    record: GenerationRecord | None = None


class RequeueKind(StrEnum):
    REQUEUED = "REQUEUED"
    TO_END = "TO_END"
    """Left RUNNING, because its end was asked for or no attempt is left: the caller seals the log, then finishes it."""
    STALE = "STALE"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueResult:
    kind: RequeueKind
    record: GenerationRecord | None = None
    """The row afterwards; None when STALE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRef:
    generation_id: GenerationId
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """What recovery found out about an attempt after sealing its log."""

    generation_id: GenerationId
    attempt: int
    outcome: AttemptOutcome
    end_position: int
    is_charged: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkWrite:
    """Output of earlier attempts, to be stored before attempt `attempt` (> 1) is assigned."""

    generation_id: GenerationId
    attempt: int
    output: Delta


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterFilter:
    """Which dead letters; None is any. `since` is the earliest time of death."""

    generation_id: GenerationId | None = None
    tenant_id: TenantId | None = None
    reason: str | None = None
    since: datetime | None = None


ALL_DEAD_LETTERS = DeadLetterFilter()


class GenerationStore(Protocol):
    """The truth about generations."""

    async def submit_many(self, items: Sequence[NewGeneration], *, now: datetime | None = None) -> list[SubmitResult]:
        """Commits request key and QUEUED row, or finds what the tenant's request_id names. Two items of one call may
        carry the same request_id: the first one decides. Idempotent."""

    async def attach_many(
        self, items: Sequence[NewGeneration], *, now: datetime | None = None
    ) -> list[SubmitResult | None]:
        """What `submit_many` would find, without writing anything; None for what it would create."""

    async def grant_many(self, items: Sequence[GrantRequest], *, now: datetime | None = None) -> list[GrantResult]:
        """QUEUED → RUNNING with attempt + 1 and an attempts row. Locks each session row FOR SHARE and checks state, epoch
        and model key; a takeover or loss in progress is waited for and then fences."""

    async def finish_many(self, items: Sequence[Finish], *, now: datetime | None = None) -> list[FinishResult]:
        """from_state → final state with output chunk, usage, attempt end, ledger row (and a dead letter when error_reason
        is ATTEMPTS_EXHAUSTED), and the request key's expiry, where state and attempt are as stated. Idempotent."""

    async def requeue_many(self, items: Sequence[AttemptRef], *, now: datetime | None = None) -> list[RequeueResult]:
        """RUNNING → QUEUED where the attempt is the current one."""

    async def record_attempt_ends(self, items: Sequence[AttemptEnd], *, now: datetime | None = None) -> list[bool]:
        """Writes how attempts ended, once each; a charge raises the generation's charged_attempts in the same
        transaction. False where the end was recorded before."""

    async def request_cancel_many(
        self, items: Sequence[tuple[GenerationId, CancelCause]]
    ) -> list[GenerationRecord | None]:
        """Records the cause on a live row that has none (the first cause stays) and returns the row afterwards; None for
        an unknown id. The caller ends QUEUED ones and tells the workers of RUNNING ones."""

    async def store_chunks_many(self, items: Sequence[ChunkWrite]) -> list[bool]:
        """Stores what is not yet stored, where the row is RUNNING at that attempt; False where it is not, or where the
        output does not continue the stored chunks (number or chain)."""

    async def read_output_many(self, generation_ids: Sequence[GenerationId]) -> list[Delta | None]:
        """The stored chunk rows, joined; None where there are none."""

    async def stored_ends_many(self, generation_ids: Sequence[GenerationId]) -> list[Cursor]:
        """Ends of the stored chunk rows; Cursor() where there are none."""

    async def get_many(self, generation_ids: Sequence[GenerationId]) -> list[GenerationRecord | None]: ...

    async def find_by_request_id(self, tenant_id: TenantId, request_id: RequestId) -> GenerationRecord | None: ...

    async def list_page(
        self, tenant_id: TenantId, *, states: Sequence[State], before: GenerationId | None, limit: int
    ) -> list[GenerationSummary]:
        """The tenant's generations with ids below `before`, newest first; all states when none is named."""

    async def queued_page(
        self, *, after: GenerationId | None, min_age: timedelta, limit: int, now: datetime | None = None
    ) -> list[GenerationSummary]:
        """QUEUED rows with ids above `after` that have been queued (created or requeued) for `min_age`, by id."""

    async def overdue_page(
        self, *, after: GenerationId | None, limit: int, now: datetime | None = None
    ) -> list[tuple[GenerationId, CancelCause]]:
        """Live rows whose deadline is over, or, never granted, whose queue timeout is, and that have no cancel cause."""

    async def cancelled_queued_page(self, *, after: GenerationId | None, limit: int) -> list[GenerationSummary]:
        """QUEUED rows with a cancel cause, or with no attempt left: to be ended."""

    async def unwatchable_page(self, *, after: GenerationId | None, limit: int) -> list[tuple[GenerationId, timedelta]]:
        """Live rows that have a grace period and no cancel cause, by id."""

    async def attempts_of(self, generation_id: GenerationId) -> list[AttemptRecord]: ...

    async def ledger_of(self, generation_id: GenerationId) -> list[LedgerRow]: ...

    async def dead_letters(self, *, limit: int, wanted: DeadLetterFilter = ALL_DEAD_LETTERS) -> list[DeadLetter]:
        """Newest first."""

    async def prune_request_keys(self, *, limit: int, now: datetime | None = None) -> int:
        """Deletes keys whose expiry (24 h past the end) is over; returns how many."""


class OpenKind(StrEnum):
    OPENED = "OPENED"
    OVER = "OVER"
    """The session is LOST or ENDED: the worker must reset itself and announce a new one."""
    DIFFERS = "DIFFERS"
    """A LIVE session of the same model stores keys and values as another type: nothing was registered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSession:
    kind: OpenKind
    owner_epoch: int
    running: tuple[GenerationRecord, ...]
    """RUNNING rows of the session, read in the transaction that raised the epoch."""
    kv_dtype: str = ""
    """With DIFFERS: what the other session has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostSession:
    """A session that was just declared LOST, and what became of its attempts in the same transaction."""

    session_id: SessionId
    requeued: tuple[GenerationRecord, ...]
    to_end: tuple[GenerationRecord, ...]
    """As RequeueKind.TO_END."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """Wish to keep a session. Its lease counts from when its worker was last heard: `heard_ago` before now."""

    session_id: SessionId
    owner_epoch: int
    heard_ago: timedelta = timedelta(0)


class SessionStore(Protocol):
    """The truth about worker sessions. Takeover and loss update the session row first, then read or requeue its
    attempts in the same transaction; a grant holds FOR SHARE on that row. So none slips in between."""

    async def open_session(
        self, session: NewSession, *, lease: timedelta, now: datetime | None = None
    ) -> OpenedSession:
        """Registers the session with epoch 1, or takes it over with epoch + 1. A repeated announcement to the same
        scheduler raises the epoch as well. LIVE sessions of one model are registered with one `kv_dtype` only, however
        many are at it at the same time; where it is empty, it is compared with none."""

    async def renew_many(
        self, items: Sequence[Renewal], *, lease: timedelta, now: datetime | None = None
    ) -> list[bool]:
        """Extends leases of LIVE sessions under the stated epoch, and never shortens one; False where the session is no
        longer the owner's."""

    async def lose_session(
        self, session_id: SessionId, owner_epoch: int, *, now: datetime | None = None
    ) -> LostSession | None:
        """LIVE → LOST under the stated epoch, attempts requeued; None where the epoch or state is another."""

    async def lose_expired(self, *, limit: int, now: datetime | None = None) -> list[LostSession]:
        """LIVE → LOST for sessions whose lease is over by the database's clock."""

    async def lose_older(
        self, session_id: SessionId, owner_epoch: int, *, now: datetime | None = None
    ) -> list[LostSession]:
        """LIVE → LOST for sessions of the same worker_id at the same address with lower ids, where the session is LIVE
        under the stated epoch. The caller has heard the session's worker at that address: the incarnations before it do
        not listen there any more."""

    async def end_session(self, session_id: SessionId, owner_epoch: int) -> bool:
        """LIVE → ENDED where it has no RUNNING attempts."""

    async def running_of(self, session_ids: Sequence[SessionId]) -> list[GenerationSummary]:
        """RUNNING rows of these sessions."""

    async def orphans(self, *, limit: int) -> list[GenerationRecord]:
        """RUNNING rows whose session is LOST or ENDED (a recovery died half-way): seal, then finish or requeue."""

    async def list_sessions(self, *, include_over: bool = False) -> list[SessionRecord]: ...


class Store(GenerationStore, SessionStore, WeightStore, Protocol):
    """All that a scheduler asks of the truth."""
