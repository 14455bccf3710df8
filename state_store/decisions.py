"""What a write does to one item, decided from the rows it has locked. Pure; every adapter asks these functions.

The statements that follow repeat the precondition in their WHERE, so a decision that is wrong changes nothing.
"""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Protocol

from service_kit.delta import ChainMismatchError, Cursor, Delta, extend_chain, rest_after
from state_store.model import CancelCause, Finish, GenerationRecord, ModelKey, NewGeneration, SessionState, State
from state_store.ports import FinishKind, GrantKind, GrantRequest, RequeueKind
from state_store.transitions import can_end_as, has_attempts_left

REQUEST_KEY_KEPT = timedelta(hours=24)
"""How long a request id stands for its generation after the end."""


class GenerationHead(Protocol):
    """The columns of a generation that decisions look at."""

    @property
    def state(self) -> State: ...
    @property
    def attempt(self) -> int: ...
    @property
    def charged_attempts(self) -> int: ...
    @property
    def cancel_cause(self) -> CancelCause | None: ...
    @property
    def model_key(self) -> ModelKey: ...


class SessionHead(Protocol):
    """The columns of a session that a grant looks at."""

    @property
    def state(self) -> SessionState: ...
    @property
    def owner_epoch(self) -> int: ...
    @property
    def model_key(self) -> ModelKey: ...


class OverdueHead(Protocol):
    """The columns that say when a live generation is overdue."""

    @property
    def state(self) -> State: ...
    @property
    def attempt(self) -> int: ...
    @property
    def deadline_at(self) -> datetime | None: ...
    @property
    def queue_deadline_at(self) -> datetime: ...


def queued_record(item: NewGeneration, now: datetime) -> GenerationRecord:
    """The row that a submit at `now` creates."""
    return GenerationRecord(
        generation_id=item.generation_id,
        tenant_id=item.tenant_id,
        key_id=item.key_id,
        request_id=item.request_id,
        model=item.model,
        model_key=item.model_key,
        priority_class=item.priority_class,
        state=State.QUEUED,
        attempt=0,
        charged_attempts=0,
        session_id=None,
        nonce=0,
        prompt_token_ids=item.prompt_token_ids,
        sampling=item.sampling,
        grace=item.grace,
        traceparent=item.traceparent,
        cancel_cause=None,
        created_at=now,
        queue_deadline_at=now + item.queue_timeout,
        deadline_at=now + item.deadline if item.deadline is not None else None,
        started_at=None,
        finished_at=None,
        finish_reason=None,
        error_reason=None,
        error_message=None,
        matched_stop=None,
        cached_prompt_tokens=0,
        output_tokens=0,
        is_stored=item.is_stored,
    )


def is_grantable(head: GenerationHead) -> bool:
    """Whether a queued row may get another attempt: nobody asked for its end and attempts are left."""
    return head.cancel_cause is None and has_attempts_left(attempt=head.attempt, charged_attempts=head.charged_attempts)


def decide_grant(request: GrantRequest, head: GenerationHead | None, session: SessionHead | None) -> GrantKind:
    """The generation is looked at first: an entry that is no longer queued is dropped whoever asks."""
    if (
        head is None
        or head.state is not State.QUEUED
        or head.attempt != request.after_attempt
        or not is_grantable(head)
    ):
        return GrantKind.NOT_QUEUED
    if session is None or session.state is not SessionState.LIVE or session.owner_epoch != request.owner_epoch:
        return GrantKind.FENCED
    return GrantKind.GRANTED if session.model_key == head.model_key else GrantKind.FENCED


def decide_requeue(attempt: int, head: GenerationHead | None) -> RequeueKind:
    if head is None or head.state is not State.RUNNING or head.attempt != attempt:
        return RequeueKind.STALE
    return RequeueKind.REQUEUED if is_grantable(head) else RequeueKind.TO_END


def decide_finish(finish: Finish, head: GenerationHead | None) -> FinishKind:
    """Whether the caller still decides; the output is checked by `missing_output`."""
    if head is None:
        return FinishKind.STALE
    if head.state.is_terminal:
        return FinishKind.ALREADY_FINISHED
    if head.state is not finish.from_state or head.attempt != finish.attempt:
        return FinishKind.STALE
    return FinishKind.FINISHED if can_end_as(finish.from_state, finish.state) else FinishKind.STALE


def missing_output(output: Delta, end: Cursor, read_stored: Callable[[], Delta | None]) -> Delta | None:
    """The part of `output` that is not stored yet, None when all of it is.

    `end` is the end of the stored output; `read_stored` is asked only when `output` ends before it. Raises
    ChainMismatchError where output and stored output differ, or where a gap lies between them.
    """
    if output.first > end.sequence_number + 1:
        raise ChainMismatchError(f"no output is stored between {end.sequence_number} and {output.first}")
    if output.last >= end.sequence_number:
        return rest_after(end, output)
    stored = read_stored()
    if stored is None or extend_chain(stored.prev_chain, stored.token_ids[: output.last]) != output.chain:
        raise ChainMismatchError(f"another output stands at sequence number {output.last}")
    return None


def output_to_finish(finish: Finish, end: Cursor, read_stored: Callable[[], Delta | None]) -> Delta | None:
    """The part of the finish's output still to be stored. Raises ChainMismatchError when it is incomplete or differs."""
    rest = missing_output(finish.output, end, read_stored) if finish.output is not None else None
    reached = rest.last if rest is not None else end.sequence_number
    if reached != finish.output_tokens:
        raise ChainMismatchError(f"the output reaches {reached} instead of {finish.output_tokens}")
    return rest


def overdue_cause(head: OverdueHead, now: datetime) -> CancelCause | None:
    """Why a live row is to end at `now`. The queue timeout counts only before the first grant."""
    if head.deadline_at is not None and head.deadline_at <= now:
        return CancelCause.DEADLINE
    if head.state is State.QUEUED and head.attempt == 0 and head.queue_deadline_at <= now:
        return CancelCause.QUEUE_TIMEOUT
    return None


def storable(text: str | None) -> str | None:
    """Text without NUL, which Postgres cannot store; error messages of foreign libraries may contain it."""
    return text.replace("\x00", "\N{REPLACEMENT CHARACTER}") if text is not None else None
