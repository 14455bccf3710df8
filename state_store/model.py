"""The durable record of a generation, and what goes with it. Pure."""

from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from enum import StrEnum

from service_kit.delta import Delta
from service_kit.ids import GenerationId, KeyId, RequestId, SchedulerId, SessionId, TenantId
from service_kit.sampling import FinishReason, SamplingParams


class State(StrEnum):
    """Where a generation stands; see transitions.py for how it moves."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    EXPIRED = "EXPIRED"

    @property
    def is_terminal(self) -> bool:
        return self not in (State.QUEUED, State.RUNNING)


class PriorityClass(StrEnum):
    """Admission class; `rank` 0 goes first."""

    INTERACTIVE = "INTERACTIVE"
    STANDARD = "STANDARD"
    BATCH = "BATCH"

    @property
    def rank(self) -> int:
        return list(PriorityClass).index(self)

    @classmethod
    def from_rank(cls, rank: int) -> "PriorityClass":
        return list(PriorityClass)[rank]


class CancelCause(StrEnum):
    """Who asked for the end of a live generation, and so which final state follows."""

    CLIENT = "CLIENT"
    GRACE = "GRACE"
    QUEUE_TIMEOUT = "QUEUE_TIMEOUT"
    DEADLINE = "DEADLINE"

    @property
    def final_state(self) -> State:
        return State.CANCELLED if self in (CancelCause.CLIENT, CancelCause.GRACE) else State.EXPIRED


class AttemptOutcome(StrEnum):
    """How an attempt ended."""

    FINISHED = "FINISHED"
    SESSION_LOST = "SESSION_LOST"
    ASSIGNMENT_LOST = "ASSIGNMENT_LOST"
    HANDED_BACK = "HANDED_BACK"


class SessionState(StrEnum):
    """Life of a worker session; LOST and ENDED are final."""

    LIVE = "LIVE"
    LOST = "LOST"
    ENDED = "ENDED"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKey:
    """What a generation is pinned to and a session must equal."""

    revision: str
    precision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NewGeneration:
    """A validated request, ready to be committed. `request_hash` covers the public spec alone."""

    generation_id: GenerationId
    tenant_id: TenantId
    key_id: KeyId
    request_id: RequestId
    request_hash: bytes
    model: str
    model_key: ModelKey
    priority_class: PriorityClass
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    grace: timedelta | None
    """How long it goes on unwatched; None is unlimited."""
    queue_timeout: timedelta
    deadline: timedelta | None
    traceparent: str
    requeue_of: GenerationId | None = None
    is_stored: bool = True
    """False: prompt and output are deleted soon after the end (see retention_store.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRecord:
    """One row of the truth, without its output (see `GenerationStore.read_output`)."""

    generation_id: GenerationId
    tenant_id: TenantId
    key_id: KeyId
    request_id: RequestId
    model: str
    model_key: ModelKey
    priority_class: PriorityClass
    state: State
    attempt: int
    """Attempts granted so far; 0 before the first grant."""
    charged_attempts: int
    session_id: SessionId | None
    """Session of the current attempt while RUNNING, else None."""
    nonce: int
    """Nonce of the current attempt; 0 before the first grant."""
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    grace: timedelta | None
    traceparent: str
    cancel_cause: CancelCause | None
    created_at: datetime
    queue_deadline_at: datetime
    deadline_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    finish_reason: FinishReason | None
    error_reason: str | None
    error_message: str | None
    matched_stop: str | None
    cached_prompt_tokens: int
    output_tokens: int
    """Final number of output tokens; 0 while live (the log knows)."""
    is_stored: bool = True
    texts_deleted_at: datetime | None = None
    """When prompt, output and stop strings were deleted; only of one that is not stored."""
    deleted_prompt_tokens: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids) + self.deleted_prompt_tokens

    @property
    def seed(self) -> int:
        return self.sampling.seed


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSummary:
    """A row without what may be long in it: pages of rows are read often. Fields as in GenerationRecord."""

    generation_id: GenerationId
    tenant_id: TenantId
    key_id: KeyId
    request_id: RequestId
    model: str
    model_key: ModelKey
    priority_class: PriorityClass
    state: State
    attempt: int
    charged_attempts: int
    session_id: SessionId | None
    num_prompt_tokens: int
    seed: int
    cancel_cause: CancelCause | None
    created_at: datetime
    queue_deadline_at: datetime
    deadline_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    finish_reason: FinishReason | None
    error_reason: str | None
    error_message: str | None
    cached_prompt_tokens: int
    output_tokens: int
    is_stored: bool = True
    texts_deleted_at: datetime | None = None

    @classmethod
    def of(cls, record: GenerationRecord) -> "GenerationSummary":
        return cls(**{each.name: getattr(record, each.name) for each in fields(cls)})


GenerationRow = GenerationRecord | GenerationSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """A final state and what it rests on. Written only where attempt and state still are the stated ones.

    `output` is what the log holds (it may begin behind chunk rows that are already stored; the overlap is verified by
    chain and skipped); chunk rows and `output` together must reach `output_tokens`.
    """

    generation_id: GenerationId
    from_state: State
    attempt: int
    state: State
    output: Delta | None
    output_tokens: int
    cached_prompt_tokens: int = 0
    finish_reason: FinishReason | None = None
    matched_stop: str | None = None
    error_reason: str | None = None
    error_message: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSession:
    """A worker incarnation as it announced itself to scheduler `scheduler_id`."""

    session_id: SessionId
    worker_id: str
    address: str
    scheduler_id: SchedulerId
    model: str
    model_key: ModelKey
    context_length: int
    num_blocks: int
    block_size: int
    max_running: int
    kv_dtype: str = ""
    """What its keys and values are stored as; empty where that is not said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    """One worker session. `owner_epoch` fences decisions about it."""

    session_id: SessionId
    worker_id: str
    address: str
    scheduler_id: SchedulerId
    owner_epoch: int
    state: SessionState
    model: str
    model_key: ModelKey
    context_length: int
    num_blocks: int
    block_size: int
    max_running: int
    kv_dtype: str
    lease_expires_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """One execution, for recovery checks and operators."""

    generation_id: GenerationId
    attempt: int
    session_id: SessionId
    worker_id: str
    nonce: int
    granted_at: datetime
    ended_at: datetime | None
    outcome: AttemptOutcome | None
    end_position: int | None
    """Last sequence number in the log when it ended."""
    is_charged: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """Usage of one finished generation; exactly one row each."""

    generation_id: GenerationId
    tenant_id: TenantId
    key_id: KeyId
    model: str
    priority_class: PriorityClass
    state: State
    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    finished_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A generation that ended because its attempts were used up. No prompt text."""

    generation_id: GenerationId
    tenant_id: TenantId
    reason: str
    message: str
    attempts: int
    worker_ids: tuple[str, ...]
    created_at: datetime
