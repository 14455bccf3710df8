"""Generations in memory: every write."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from service_kit.delta import ChainMismatchError, Delta
from service_kit.errors import Reason
from service_kit.ids import GenerationId
from state_store.decisions import (
    REQUEST_KEY_KEPT,
    decide_finish,
    decide_grant,
    decide_requeue,
    missing_output,
    output_to_finish,
    queued_record,
    storable,
)
from state_store.memory.data import MemoryPart, RequestKey
from state_store.model import (
    AttemptOutcome,
    AttemptRecord,
    CancelCause,
    DeadLetter,
    Finish,
    GenerationRecord,
    LedgerRow,
    NewGeneration,
    State,
)
from state_store.ports import (
    AttemptEnd,
    AttemptRef,
    ChunkWrite,
    FinishKind,
    FinishResult,
    GrantKind,
    GrantRequest,
    GrantResult,
    RequeueKind,
    RequeueResult,
    SubmitKind,
    SubmitResult,
)


class MemoryGenerationWrites(MemoryPart):
    """The writing half of GenerationStore."""

    async def submit_many(self, items: Sequence[NewGeneration], *, now: datetime | None = None) -> list[SubmitResult]:
        return [self._submit(item, self._at(now)) for item in items]

    def _submit(self, item: NewGeneration, now: datetime) -> SubmitResult:
        found = self._attach(item, now)
        if found is not None:
            return found
        name = (item.tenant_id, item.request_id)
        self._data.request_keys[name] = RequestKey(generation_id=item.generation_id, request_hash=item.request_hash)
        self._data.queued_at[item.generation_id] = now
        return SubmitResult(kind=SubmitKind.CREATED, record=self._put(queued_record(item, now)))

    async def attach_many(
        self, items: Sequence[NewGeneration], *, now: datetime | None = None
    ) -> list[SubmitResult | None]:
        return [self._attach(item, self._at(now)) for item in items]

    def _attach(self, item: NewGeneration, now: datetime) -> SubmitResult | None:
        key = self._data.request_keys.get((item.tenant_id, item.request_id))
        if key is not None and (key.expires_at is None or key.expires_at >= now):
            kind = SubmitKind.EXISTING if key.request_hash == item.request_hash else SubmitKind.CONFLICT
            return SubmitResult(kind=kind, record=self._data.generations[key.generation_id])
        taken = self._data.generations.get(item.generation_id)
        return SubmitResult(kind=SubmitKind.CONFLICT, record=taken) if taken is not None else None

    async def grant_many(self, items: Sequence[GrantRequest], *, now: datetime | None = None) -> list[GrantResult]:
        return [self._grant(item, self._at(now)) for item in items]

    def _grant(self, item: GrantRequest, now: datetime) -> GrantResult:
        record = self._data.generations.get(item.generation_id)
        session = self._data.sessions.get(item.session_id)
        kind = decide_grant(item, record, session)
        if kind is not GrantKind.GRANTED:
            return GrantResult(kind=kind)
        assert record is not None
        assert session is not None
        granted = replace(
            record,
            state=State.RUNNING,
            attempt=record.attempt + 1,
            session_id=item.session_id,
            nonce=item.nonce,
            started_at=record.started_at or now,
        )
        self._data.attempts.setdefault(item.generation_id, []).append(
            AttemptRecord(
                generation_id=item.generation_id,
                attempt=granted.attempt,
                session_id=item.session_id,
                worker_id=session.worker_id,
                nonce=item.nonce,
                granted_at=now,
                ended_at=None,
                outcome=None,
                end_position=None,
                is_charged=False,
            )
        )
        return GrantResult(kind=kind, record=self._put(granted))

    async def finish_many(self, items: Sequence[Finish], *, now: datetime | None = None) -> list[FinishResult]:
        return [self._finish(item, self._at(now)) for item in items]

    def _finish(self, item: Finish, now: datetime) -> FinishResult:
        record = self._data.generations.get(item.generation_id)
        kind = decide_finish(item, record)
        if kind is FinishKind.ALREADY_FINISHED:
            return FinishResult(kind=kind, record=record)
        if kind is not FinishKind.FINISHED or record is None:
            return FinishResult(kind=kind)
        try:
            rest = output_to_finish(
                item, self._stored_end(item.generation_id), lambda: self._stored(item.generation_id)
            )
        except ChainMismatchError:
            return FinishResult(kind=FinishKind.INCOMPLETE)
        self._store(item.generation_id, rest)
        return FinishResult(kind=kind, record=self._end(record, item, now))

    def _end(self, record: GenerationRecord, item: Finish, now: datetime) -> GenerationRecord:
        final = self._put(
            replace(
                record,
                state=item.state,
                session_id=None,
                finished_at=now,
                finish_reason=item.finish_reason,
                error_reason=storable(item.error_reason),
                error_message=storable(item.error_message),
                matched_stop=storable(item.matched_stop),
                cached_prompt_tokens=item.cached_prompt_tokens,
                output_tokens=item.output_tokens,
            )
        )
        attempt = self._find_attempt(final.generation_id, final.attempt)
        if record.state is State.RUNNING and attempt is not None and attempt.outcome is None:
            self._put_attempt(
                replace(attempt, ended_at=now, outcome=AttemptOutcome.FINISHED, end_position=item.output_tokens)
            )
        self._data.ledger[final.generation_id] = _ledger_row(final, now)
        if final.error_reason == Reason.ATTEMPTS_EXHAUSTED:
            self._data.dead_letters[final.generation_id] = self._dead_letter(final, now)
        name = (final.tenant_id, final.request_id)
        key = self._data.request_keys.get(name)
        if key is not None and key.generation_id == final.generation_id:
            self._data.request_keys[name] = replace(key, expires_at=now + REQUEST_KEY_KEPT)
        return final

    def _dead_letter(self, record: GenerationRecord, now: datetime) -> DeadLetter:
        return DeadLetter(
            generation_id=record.generation_id,
            tenant_id=record.tenant_id,
            reason=record.error_reason or "",
            message=record.error_message or "",
            attempts=record.attempt,
            worker_ids=tuple(attempt.worker_id for attempt in self._data.attempts.get(record.generation_id, [])),
            created_at=now,
        )

    async def requeue_many(self, items: Sequence[AttemptRef], *, now: datetime | None = None) -> list[RequeueResult]:
        return [self._requeue(item, self._at(now)) for item in items]

    def _requeue(self, item: AttemptRef, now: datetime) -> RequeueResult:
        record = self._data.generations.get(item.generation_id)
        kind = decide_requeue(item.attempt, record)
        if kind is RequeueKind.STALE or record is None:
            return RequeueResult(kind=kind)
        return RequeueResult(kind=kind, record=self._requeue_or_leave(record, now)[0])

    async def record_attempt_ends(self, items: Sequence[AttemptEnd], *, now: datetime | None = None) -> list[bool]:
        return [self._record_end(item, self._at(now)) for item in items]

    def _record_end(self, item: AttemptEnd, now: datetime) -> bool:
        attempt = self._find_attempt(item.generation_id, item.attempt)
        if attempt is None or attempt.outcome is not None:
            return False
        self._put_attempt(
            replace(
                attempt,
                ended_at=attempt.ended_at or now,
                outcome=item.outcome,
                end_position=item.end_position,
                is_charged=item.is_charged,
            )
        )
        if item.is_charged:
            record = self._data.generations[item.generation_id]
            self._put(replace(record, charged_attempts=record.charged_attempts + 1))
        return True

    async def request_cancel_many(
        self, items: Sequence[tuple[GenerationId, CancelCause]]
    ) -> list[GenerationRecord | None]:
        return [self._request_cancel(generation_id, cause) for generation_id, cause in items]

    def _request_cancel(self, generation_id: GenerationId, cause: CancelCause) -> GenerationRecord | None:
        record = self._data.generations.get(generation_id)
        if record is None or record.state.is_terminal or record.cancel_cause is not None:
            return record
        return self._put(replace(record, cancel_cause=cause))

    async def store_chunks_many(self, items: Sequence[ChunkWrite]) -> list[bool]:
        return [self._store_chunk(item) for item in items]

    def _store_chunk(self, item: ChunkWrite) -> bool:
        record = self._data.generations.get(item.generation_id)
        if record is None or record.state is not State.RUNNING or record.attempt != item.attempt:
            return False
        end = self._stored_end(item.generation_id)
        try:
            rest = missing_output(item.output, end, lambda: self._stored(item.generation_id))
        except ChainMismatchError:
            return False
        self._store(item.generation_id, rest)
        return True

    def _store(self, generation_id: GenerationId, rest: Delta | None) -> None:
        if rest is not None:
            self._data.chunks.setdefault(generation_id, []).append(rest)


def _ledger_row(final: GenerationRecord, now: datetime) -> LedgerRow:
    return LedgerRow(
        generation_id=final.generation_id,
        tenant_id=final.tenant_id,
        key_id=final.key_id,
        model=final.model,
        priority_class=final.priority_class,
        state=final.state,
        prompt_tokens=final.num_prompt_tokens,
        cached_prompt_tokens=final.cached_prompt_tokens,
        output_tokens=final.output_tokens,
        finished_at=now,
    )
