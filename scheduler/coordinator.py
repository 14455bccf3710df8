"""Writes what workers say: tokens into the delta log, ends into Postgres, and only then the log's end.

Append before acknowledge, commit before close. If the process dies between two of these steps, the worker still holds the
tokens and the end (it forgets them only when the end is acknowledged), and the next owner of the session repeats the step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from scheduler.batcher import Batcher
from scheduler.policy import WorkerEnd, finish_from_worker
from service_kit.crash_point import CrashPoints
from service_kit.delta import Delta, join
from service_kit.errors import Reason, UnavailableError
from service_kit.logging import get_logger
from state_store.delta_log.port import AppendItem, AppendStatus, DeltaLogWriter, LogEnd, LogView, OpenItem, SealItem
from state_store.model import Finish, GenerationRecord, State
from state_store.ports import AttemptRef, FinishKind, GenerationStore
from state_store.quota.port import QuotaPort, QuotaSettlement

_log = get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptNews:
    """What a worker reports about one attempt: tokens, its end, or both (the end then follows the tokens)."""

    ref: AttemptRef
    delta: Delta | None
    end: WorkerEnd | None


class Verdict(StrEnum):
    """What the worker is to do with an attempt."""

    KEEP = "KEEP"
    RESEND_FROM = "RESEND_FROM"
    ABORT = "ABORT"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewsResult:
    """`resend_from` is the first sequence number to send again, with RESEND_FROM only; `num_appended` are the tokens that the
    log did not have before."""

    verdict: Verdict
    resend_from: int = 0
    num_appended: int = 0


KEEP = NewsResult(verdict=Verdict.KEEP)
ABORT = NewsResult(verdict=Verdict.ABORT)


def resend_from(sequence_number: int) -> NewsResult:
    return NewsResult(verdict=Verdict.RESEND_FROM, resend_from=sequence_number)


class EndResult(StrEnum):
    """What became of a worker's last word."""

    COMMITTED = "COMMITTED"
    STALE = "STALE"
    INCOMPLETE = "INCOMPLETE"
    BROKEN = "BROKEN"
    """Our bug: nothing is known about it. The worker still holds the end, and is to give it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOutcome:
    """`resend_from` says where the log ends when the output is INCOMPLETE."""

    result: EndResult
    resend_from: int = 0


class Coordinator:
    """One per scheduler process; all its sessions share it."""

    def __init__(
        self, *, store: GenerationStore, log: DeltaLogWriter, quota: QuotaPort, crash_points: CrashPoints
    ) -> None:
        self._store = store
        self._log = log
        self._quota = quota
        self._crash_points = crash_points
        self._ends: Batcher[tuple[AttemptRef, WorkerEnd], EndOutcome] = Batcher(self._end_batch)
        self.num_stale_appends = 0

    async def append(self, news: Sequence[AttemptNews]) -> list[NewsResult]:
        """Appends all tokens in one call. Raises LogUnavailableError: then nothing is known, and the same news may be
        appended again."""
        with_tokens = [item for item in news if item.delta is not None]
        appended = await self._log.append_many(
            [
                AppendItem(generation_id=item.ref.generation_id, attempt=item.ref.attempt, delta=item.delta)
                for item in with_tokens
                if item.delta is not None
            ]
        )
        results: dict[AttemptRef, NewsResult] = {}
        unopened: list[AttemptRef] = []
        for item, result in zip(with_tokens, appended, strict=True):
            match result.status:
                case AppendStatus.OK:
                    num_appended = len(item.delta.token_ids) if item.delta is not None else 0
                    results[item.ref] = NewsResult(verdict=Verdict.KEEP, num_appended=num_appended)
                case AppendStatus.DUP:
                    results[item.ref] = KEEP
                case AppendStatus.GAP:
                    results[item.ref] = resend_from(result.end.sequence_number + 1)
                case AppendStatus.STALE:
                    self.num_stale_appends += 1
                    _log.warning("append_refused", generation_id=item.ref.generation_id, attempt=item.ref.attempt)
                    results[item.ref] = ABORT
                case AppendStatus.UNOPENED | AppendStatus.ABSENT:
                    unopened.append(item.ref)
                case _:
                    assert_never(result.status)
        results.update(await self.reopen(unopened))
        return [results.get(item.ref, KEEP) for item in news]

    async def reopen(self, refs: Sequence[AttemptRef]) -> dict[AttemptRef, NewsResult]:
        """Opens logs that lost the open of these attempts (emptied, or cut back), from what Postgres has; the worker
        then sends again what it produced in this attempt. Only the attempt that Postgres names: an emptied log has
        forgotten which attempts were fenced off."""
        if not refs:
            return {}
        named, records = refs, await self._store.get_many([ref.generation_id for ref in refs])
        refs = [
            ref
            for ref, record in zip(named, records, strict=True)
            if record is not None and record.state is State.RUNNING and record.attempt == ref.attempt
        ]
        bases = await self._store.stored_ends_many([ref.generation_id for ref in refs])
        opened = await self._log.open_many(
            [
                OpenItem(generation_id=ref.generation_id, attempt=ref.attempt, base=base)
                for ref, base in zip(refs, bases, strict=True)
            ]
        )
        _log.warning("logs_reopened", count=len(refs), refused=len(named) - len(refs))
        return dict.fromkeys(named, ABORT) | {
            ref: resend_from(result.end.sequence_number + 1) if result.is_opened else ABORT
            for ref, result in zip(refs, opened, strict=True)
        }

    async def judge(self, held: Sequence[tuple[AttemptRef, int]]) -> dict[AttemptRef, NewsResult]:
        """Verdicts for attempts that a worker holds at these positions, by the log: after a reconnect nobody knows which
        batches arrived."""
        views = await self._log.read_many([(ref.generation_id, position) for ref, position in held])
        verdicts: dict[AttemptRef, NewsResult] = {}
        lost_opens: list[AttemptRef] = []
        for (ref, _), view in zip(held, views, strict=True):
            if not view.is_present or view.attempt < ref.attempt:
                lost_opens.append(ref)
            elif view.attempt > ref.attempt or not view.is_open:
                verdicts[ref] = ABORT
            else:
                verdicts[ref] = resend_from(view.end.sequence_number + 1)
        verdicts.update(await self.reopen(lost_opens))
        return verdicts

    async def end(self, ref: AttemptRef, end: WorkerEnd) -> EndOutcome:
        """Commits a worker's last word, then closes the log. All tokens must have been appended before. Raises
        UnavailableError: then the same end may be given again."""
        return await self._ends.submit((ref, end))

    async def _end_batch(self, items: Sequence[tuple[AttemptRef, WorkerEnd]]) -> list[EndOutcome]:
        """One bad item must not keep the others from ending: whatever it raises, it raises alone."""
        try:
            return await self._end_all(items)
        except UnavailableError:
            raise
        except Exception:  # noqa: BLE001 - whatever it is, one item must not take the others along
            if len(items) == 1:
                (ref, _) = items[0]
                _log.exception("end_failed", generation_id=ref.generation_id, attempt=ref.attempt)
                return [EndOutcome(result=EndResult.BROKEN)]
            _log.exception("ends_failed", count=len(items))
        return [outcome for item in items for outcome in await self._end_batch([item])]

    async def _end_all(self, items: Sequence[tuple[AttemptRef, WorkerEnd]]) -> list[EndOutcome]:
        ids = [ref.generation_id for ref, _ in items]
        records = await self._store.get_many(ids)
        views = await self._log.read_many([(generation_id, 0) for generation_id in ids])
        outcomes: dict[AttemptRef, EndOutcome] = {}
        finals: dict[AttemptRef, GenerationRecord] = {}
        finishes: list[tuple[AttemptRef, Finish]] = []
        for (ref, end), record, view in zip(items, records, views, strict=True):
            if record is not None and record.state.is_terminal and record.attempt == ref.attempt:
                finals[ref] = record
            elif record is None or record.state is not State.RUNNING or record.attempt != ref.attempt:
                outcomes[ref] = EndOutcome(result=EndResult.STALE)
            elif not _reaches(view, end):
                outcomes[ref] = _incomplete(view)
            else:
                finishes.append((ref, finish_from_worker(record, end, join(view.deltas))))
        results = await self._store.finish_many([finish for _, finish in finishes])
        self._crash_points.hit("finish.committed")
        broken: list[Finish] = []
        for (ref, finish), result in zip(finishes, results, strict=True):
            match result.kind:
                case FinishKind.FINISHED | FinishKind.ALREADY_FINISHED:
                    assert result.record is not None
                    finals[ref] = result.record
                case FinishKind.STALE:
                    outcomes[ref] = EndOutcome(result=EndResult.STALE)
                case FinishKind.INCOMPLETE:
                    broken.append(finish)
                case _:
                    assert_never(result.kind)
        for record in await self._fail_broken(broken):
            finals[AttemptRef(generation_id=record.generation_id, attempt=record.attempt)] = record
        await self.close_logs(finals.values())
        outcomes.update(dict.fromkeys(finals, EndOutcome(result=EndResult.COMMITTED)))
        return [outcomes[ref] for ref, _ in items]

    async def _fail_broken(self, finishes: Sequence[Finish]) -> list[GenerationRecord]:
        """The log reached the end and yet does not continue the chunk rows: what is stored stands, the rest is lost."""
        if not finishes:
            return []
        for finish in finishes:
            _log.error("output_contradicts_chunks", generation_id=finish.generation_id, attempt=finish.attempt)
        ends = await self._store.stored_ends_many([finish.generation_id for finish in finishes])
        results = await self._store.finish_many(
            [
                Finish(
                    generation_id=finish.generation_id,
                    from_state=finish.from_state,
                    attempt=finish.attempt,
                    state=State.FAILED,
                    output=None,
                    output_tokens=end.sequence_number,
                    error_reason=Reason.OUTPUT_CONTRADICTED.value,
                    error_message="the output after the stored part was lost and could not be restored",
                )
                for finish, end in zip(finishes, ends, strict=True)
            ]
        )
        return [result.record for result in results if result.record is not None]

    async def close_logs(self, records: Iterable[GenerationRecord]) -> None:
        """Tells readers of final rows that they are final, and settles their quota. Repeating it is harmless."""
        finals = list(records)
        if not finals:
            return
        await self._log.seal_many(
            [
                SealItem(generation_id=record.generation_id, attempt=record.attempt, terminal=LogEnd.of(record))
                for record in finals
            ]
        )
        settlements = [
            QuotaSettlement(
                generation_id=record.generation_id,
                tenant_id=record.tenant_id,
                key_id=record.key_id,
                used_tokens=record.num_prompt_tokens + record.output_tokens,
            )
            for record in finals
        ]
        try:
            await self._quota.settle_many(settlements)
        except UnavailableError:
            # An end never waits for the counts: the reservations fall due, and are settled then by what the rows say.
            _log.warning("settlements_left_to_reaper", count=len(settlements))


def _reaches(view: LogView, end: WorkerEnd) -> bool:
    return view.end.sequence_number == end.output_tokens if view.is_present else end.output_tokens == 0


def _incomplete(view: LogView) -> EndOutcome:
    return EndOutcome(result=EndResult.INCOMPLETE, resend_from=view.end.sequence_number + 1)
