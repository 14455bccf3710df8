"""What happens to generations that lost their worker, or that end without one.

Order at a loss: commit QUEUED (the caller has done that) → seal the log → record how the attempt ended → queue again. A
crash after any of these steps is repaired: the next open fences what a missing seal would have, the reaper queues what
stands QUEUED without an entry.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime

from scheduler.coordinator import Coordinator
from scheduler.output import BrokenOutputError, combine
from scheduler.policy import LostAttempt, back_off, charged_of, finish_without_worker, queue_entry_of
from scheduler.queue.port import AdmissionQueue
from scheduler.tenant_weights import TenantWeights
from service_kit.crash_point import CrashPoints
from service_kit.delta import Cursor
from service_kit.logging import get_logger
from state_store.delta_log.port import DeltaLogWriter, LogView, SealItem
from state_store.model import AttemptOutcome, Finish, GenerationRecord, GenerationRow
from state_store.ports import AttemptEnd, AttemptRef, GenerationStore, LostSession, RequeueKind

_log = get_logger()


class Recovery:
    """One per scheduler process. All methods may be repeated, and may run on several schedulers at once."""

    def __init__(
        self,
        *,
        store: GenerationStore,
        log: DeltaLogWriter,
        queue: AdmissionQueue,
        weights: TenantWeights,
        coordinator: Coordinator,
        crash_points: CrashPoints,
        now: Callable[[], datetime],
    ) -> None:
        self._store = store
        self._weights = weights
        self._now = now
        self._log = log
        self._queue = queue
        self._coordinator = coordinator
        self._crash_points = crash_points

    async def recover_session(
        self,
        lost: LostSession,
        *,
        outcome: AttemptOutcome = AttemptOutcome.SESSION_LOST,
        untried: Collection[AttemptRef] | None = None,
    ) -> None:
        """Continues after a session was declared lost in Postgres. `untried` as for `charged_of`."""
        _log.warning("session_lost", session_id=lost.session_id, requeued=len(lost.requeued), to_end=len(lost.to_end))
        self._crash_points.hit("requeue.committed")
        await self._requeue(lost.requeued, outcome, untried)
        await self.end_rows(lost.to_end)

    async def give_back(self, refs: Sequence[AttemptRef], outcome: AttemptOutcome) -> None:
        """Takes attempts of one session from it and queues them again."""
        results = await self._store.requeue_many(refs)
        requeued = [r.record for r in results if r.kind is RequeueKind.REQUEUED and r.record is not None]
        to_end = [r.record for r in results if r.kind is RequeueKind.TO_END and r.record is not None]
        await self._requeue(requeued, outcome)
        await self.end_rows(to_end)

    async def _requeue(
        self,
        records: Sequence[GenerationRecord],
        outcome: AttemptOutcome,
        untried: Collection[AttemptRef] | None = None,
    ) -> None:
        sealed = zip(records, await self._seal(records), strict=True) if records else ()
        # Where the log is past the attempt, the reaper was faster and it was granted again: what the log says is no longer
        # that attempt's, and nothing is known about it. As after a crash behind the requeue, nobody is charged.
        found = [(record, view) for record, view in sealed if view.attempt <= record.attempt]
        records, views = [record for record, _ in found], [view for _, view in found]
        if not records:
            return
        ids = [record.generation_id for record in records]
        starts = await self._store.stored_ends_many(ids)
        lost = [
            LostAttempt(
                ref=AttemptRef(generation_id=record.generation_id, attempt=record.attempt),
                added_tokens=view.end.sequence_number - start.sequence_number,
                was_charged=record.charged_attempts > 0,
            )
            for record, view, start in zip(records, views, starts, strict=True)
        ]
        charged = charged_of(lost, untried) if outcome is AttemptOutcome.SESSION_LOST else frozenset()
        if charged:
            _log.warning("attempts_charged", generation_ids=sorted(ref.generation_id for ref in charged))
        await self._store.record_attempt_ends(
            [
                AttemptEnd(
                    generation_id=record.generation_id,
                    attempt=record.attempt,
                    outcome=outcome,
                    end_position=max(view.end.sequence_number, start.sequence_number),
                    is_charged=attempt.ref in charged,
                )
                for record, view, start, attempt in zip(records, views, starts, lost, strict=True)
            ]
        )
        # The charge may have used up the last attempt: the rows as they are now decide.
        now = [record for record in await self._store.get_many(ids) if record is not None]
        live = [record for record in now if not record.state.is_terminal]
        exhausted = [record for record in live if finish_without_worker(record, Cursor(), None) is not None]
        await self._enqueue([record for record in live if record not in exhausted], views, charged)
        await self.end_rows(exhausted)

    async def _enqueue(
        self, records: Sequence[GenerationRecord], views: Sequence[LogView], charged: Collection[AttemptRef]
    ) -> None:
        """Back to their old place; those whose attempt was charged after a while."""
        tokens = {view.generation_id: view.end.sequence_number for view in views}
        charged_ids = {ref.generation_id for ref in charged}
        weights = await self._weights.of({record.tenant_id for record in records})
        now = self._now()
        await self._queue.enqueue_many(
            [
                queue_entry_of(
                    record,
                    weight=weights[record.tenant_id],
                    output_tokens=tokens[record.generation_id],
                    ready_at=now + back_off(record.charged_attempts) if record.generation_id in charged_ids else None,
                )
                for record in records
            ]
        )

    async def end_rows(self, records: Iterable[GenerationRow]) -> None:
        """Ends live rows that no worker will end: cancelled or expired while queued, or lost with no attempt left. What
        was granted in the meantime is left to its worker."""
        rows = list(records)
        if not rows:
            return
        views = await self._seal(rows)
        stored = await self._store.read_output_many([row.generation_id for row in rows])
        full = await self._log.read_many([(row.generation_id, 0) for row in rows])
        finishes: list[Finish] = []
        for row, sealed, whole, chunks in zip(rows, views, full, stored, strict=True):
            try:
                output = combine(chunks, whole)
            except BrokenOutputError:
                _log.exception("output_broken_at_end", generation_id=row.generation_id, attempt=row.attempt)
                output = chunks
            end = output.end if output is not None else sealed.base
            finish = finish_without_worker(row, end, output)
            if finish is not None:
                finishes.append(finish)
        results = await self._store.finish_many(finishes)
        finals = [r.record for r in results if r.record is not None and r.record.state.is_terminal]
        await self._coordinator.close_logs(finals)
        await self._queue.remove_many([(record.model_key, record.generation_id) for record in finals])

    async def _seal(self, records: Sequence[GenerationRow]) -> list[LogView]:
        return await self._log.seal_many(
            [SealItem(generation_id=record.generation_id, attempt=record.attempt) for record in records]
        )
