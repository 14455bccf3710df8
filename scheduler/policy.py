"""Decisions of the scheduler as pure functions: what a row's end looks like, who is charged, what fits."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import accumulate

from scheduler.queue.port import ByClass, QueueEntry, SessionRoom
from service_kit.delta import Cursor, Delta
from service_kit.errors import Reason
from service_kit.ids import SessionId, TenantId
from service_kit.sampling import FinishReason
from state_store.model import CancelCause, Finish, GenerationRecord, GenerationRow, State
from state_store.ports import AttemptRef
from state_store.transitions import has_attempts_left


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnd:
    """A worker's last word about an attempt."""

    output_tokens: int
    cached_prompt_tokens: int
    finish_reason: FinishReason | None
    failure: str | None
    matched_stop: str | None


def finish_from_worker(record: GenerationRecord, end: WorkerEnd, output: Delta | None) -> Finish:
    """The final state of a running generation whose worker has said its last word."""
    state, error_reason, error_message = State.SUCCEEDED, None, None
    if end.failure is not None:
        state, error_reason, error_message = State.FAILED, Reason.ENGINE_FAILURE.value, end.failure
    elif end.finish_reason is FinishReason.CANCELLED:
        cause = record.cancel_cause or CancelCause.CLIENT
        state, error_reason, error_message = cause.final_state, cause.value, _cancel_message(cause)
    return Finish(
        generation_id=record.generation_id,
        from_state=State.RUNNING,
        attempt=record.attempt,
        state=state,
        output=output,
        output_tokens=end.output_tokens,
        cached_prompt_tokens=end.cached_prompt_tokens,
        finish_reason=end.finish_reason if state in (State.SUCCEEDED, State.CANCELLED) else None,
        matched_stop=end.matched_stop,
        error_reason=error_reason,
        error_message=error_message,
    )


def finish_without_worker(record: GenerationRow, sealed_end: Cursor, output: Delta | None) -> Finish | None:
    """The final state that recovery gives a row after sealing its log; None when the row is to go on."""
    if record.cancel_cause is not None:
        state = record.cancel_cause.final_state
        reason, message = record.cancel_cause.value, _cancel_message(record.cancel_cause)
    elif not has_attempts_left(attempt=record.attempt, charged_attempts=record.charged_attempts):
        state, reason = State.FAILED, Reason.ATTEMPTS_EXHAUSTED.value
        message = f"given up after {record.attempt} attempts, {record.charged_attempts} of them charged"
    else:
        return None
    return Finish(
        generation_id=record.generation_id,
        from_state=record.state,
        attempt=record.attempt,
        state=state,
        output=output,
        output_tokens=sealed_end.sequence_number,
        finish_reason=FinishReason.CANCELLED if state is State.CANCELLED else None,
        error_reason=reason,
        error_message=message,
    )


def _cancel_message(cause: CancelCause) -> str:
    return {
        CancelCause.CLIENT: "cancelled by the caller",
        CancelCause.GRACE: "nobody read it for longer than its grace period",
        CancelCause.QUEUE_TIMEOUT: "no worker took it before its queue timeout",
        CancelCause.DEADLINE: "its deadline passed",
    }[cause]


def queue_entry_of(
    record: GenerationRow, *, weight: float, output_tokens: int = 0, ready_at: datetime | None = None
) -> QueueEntry:
    """The queue entry of a QUEUED row. Its room is what its context needs at once; the output grows block by block and
    the engine preempts where that does not fit. The queue timeout counts only before the first grant, but its place among
    the tenant's entries stays what it was.
    """
    limits = [record.deadline_at, record.queue_deadline_at if record.attempt == 0 else None]
    return QueueEntry(
        generation_id=record.generation_id,
        attempt=record.attempt,
        model_key=record.model_key,
        tenant_id=record.tenant_id,
        weight=weight,
        priority_class=record.priority_class,
        prompt_tokens=record.num_prompt_tokens,
        max_tokens=record.num_prompt_tokens + output_tokens + 1,
        arrived_at=record.created_at,
        order_at=min(record.queue_deadline_at, record.deadline_at or record.queue_deadline_at),
        deadline_at=min((limit for limit in limits if limit is not None), default=None),
        ready_at=ready_at,
        is_charged=record.charged_attempts > 0,
    )


FIRST_BACK_OFF = timedelta(seconds=1)
LONGEST_BACK_OFF = timedelta(seconds=30)


def back_off(charged_attempts: int) -> timedelta:
    """How long a generation waits before its next attempt when this one was charged, `charged_attempts` in all: what
    crashed a worker may crash the next one as well, and the others shall have time to get on."""
    return min(FIRST_BACK_OFF * (1 << (charged_attempts - 1)), LONGEST_BACK_OFF)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """A session as the dispatcher sees it: attempts that were given to it and have not ended, room of its latest report, and
    the context of what was dispatched but does not show in it yet, by class."""

    session_id: SessionId
    max_running: int
    num_outstanding: ByClass
    room_blocks: ByClass
    num_blocks: int
    block_size: int
    unseen_tokens: ByClass
    is_draining: bool
    has_suspect: bool = False
    """Whether it runs a generation that was charged and has not added a token since."""


LOOK_AHEAD = 2
"""Attempts given to a session beyond its batch, so that the round trip to the scheduler is hidden."""


def room_of(capacity: Capacity) -> SessionRoom:
    """What a session can take now; reports older than the last dispatch are corrected by what it has not yet seen.

    What was dispatched of a lower class takes nothing from a higher one: the engine takes blocks and slots from it.
    """
    slots = 0 if capacity.is_draining else capacity.max_running + LOOK_AHEAD
    blocks = (0, 0, 0) if capacity.is_draining else capacity.room_blocks
    tokens = (each * capacity.block_size for each in blocks)
    return SessionRoom(
        session_id=capacity.session_id,
        max_entries=_what_is_left((slots, slots, slots), capacity.num_outstanding),
        max_tokens=_what_is_left(tokens, capacity.unseen_tokens),
        capacity_tokens=capacity.num_blocks * capacity.block_size,
        max_charged=int(not capacity.has_suspect),
    )


def _what_is_left(room: Iterable[int], used: ByClass) -> ByClass:
    """Of a room by class, when `used` by class counts against each class and those below it."""
    interactive, standard, batch = (max(0, size - taken) for size, taken in zip(room, accumulate(used), strict=True))
    return interactive, standard, batch


def prefix_salt(tenant_id: TenantId, *, is_shared: bool) -> str:
    """What separates cached prefixes: how long a prompt takes would tell one tenant what another has asked."""
    return "" if is_shared else tenant_id


@dataclass(frozen=True, slots=True, kw_only=True)
class LostAttempt:
    """An attempt whose session died. `was_charged`: an earlier attempt of its generation counts against it."""

    ref: AttemptRef
    added_tokens: int
    was_charged: bool


def charged_of(lost: Sequence[LostAttempt], untried: Collection[AttemptRef] | None) -> frozenset[AttemptRef]:
    """Which attempts of one dead session count against their generations.

    `untried` is what the fatal step ran before it had made a token; None when that is unknown: then it could be every
    attempt. What added a token did not do it. One that was charged before did it: no other such one travelled with it.
    """
    suspects = [attempt for attempt in lost if not attempt.added_tokens and (untried is None or attempt.ref in untried)]
    known = [attempt for attempt in suspects if attempt.was_charged]
    return frozenset(attempt.ref for attempt in known or suspects)


def is_unwatched_for_too_long(
    *,
    last_watched_at: datetime | None,
    created_at: datetime,
    watching_known_since: datetime,
    grace: timedelta,
    now: datetime,
) -> bool:
    """Grace runs from the latest of: the last watcher, the creation, the moment from which watching could be seen."""
    since = max(created_at, watching_known_since)
    return now - max(last_watched_at or since, since) > grace
