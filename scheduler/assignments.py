"""From a committed grant to what its worker is told: grant commit → open → chunk rows → assign exactly what open returned."""

from collections.abc import Sequence

from scheduler.output import BrokenOutputError, combine
from service_kit.delta import Delta
from service_kit.logging import get_logger
from state_store.delta_log.port import DeltaLogWriter, LogView, OpenItem
from state_store.model import GenerationRecord, State
from state_store.ports import ChunkWrite, GenerationStore

_log = get_logger()

Output = tuple[int, ...]


class Assignments:
    """Opens logs for granted attempts. Raises UnavailableError when a store is: the grant stands, and the session assigns
    again when its worker does not name the attempt in time."""

    def __init__(self, *, store: GenerationStore, log: DeltaLogWriter) -> None:
        self._store = store
        self._log = log

    async def open_many(self, records: Sequence[GenerationRecord]) -> list[Output | None]:
        """The output each attempt continues; None where the log refused (it is at this attempt or a higher one)."""
        ids = [record.generation_id for record in records]
        bases = await self._store.stored_ends_many(ids)
        opened = await self._log.open_many(
            [
                OpenItem(generation_id=record.generation_id, attempt=record.attempt, base=base)
                for record, base in zip(records, bases, strict=True)
            ]
        )
        views = [
            LogView(
                generation_id=generation_id,
                is_present=result.is_opened,
                attempt=result.attempt,
                is_open=result.is_opened,
                base=result.base,
                end=result.end,
                deltas=result.deltas,
            )
            for generation_id, result in zip(ids, opened, strict=True)
        ]
        return await self._outputs(records, views)

    async def reopen(self, record: GenerationRecord) -> Output | None:
        """The output to assign again; None when the attempt is over by the row, or by the log: that is past it or closed."""
        now = (await self._store.get_many([record.generation_id]))[0]
        if now is None or now.state is not State.RUNNING or now.attempt != record.attempt:
            return None
        view = (await self._log.read_many([(record.generation_id, 0)]))[0]
        if not view.is_present or view.attempt < record.attempt:
            return (await self.open_many([record]))[0]
        if view.attempt > record.attempt or not view.is_open:
            return None
        return (await self._outputs([record], [view]))[0]

    async def _outputs(self, records: Sequence[GenerationRecord], views: Sequence[LogView]) -> list[Output | None]:
        continuing = [
            record.generation_id
            for record, view in zip(records, views, strict=True)
            if view.is_open and (record.attempt > 1 or view.base.sequence_number > 0)
        ]
        stored = (
            dict(zip(continuing, await self._store.read_output_many(continuing), strict=True)) if continuing else {}
        )
        outputs: list[Output | None] = []
        writes: list[ChunkWrite] = []
        for record, view in zip(records, views, strict=True):
            if not view.is_open:
                _log.warning("log_open_refused", generation_id=record.generation_id, attempt=record.attempt)
                outputs.append(None)
                continue
            try:
                whole: Delta | None = combine(stored.get(record.generation_id), view)
            except BrokenOutputError:
                # Not assigned, so the attempt is given back; the bound on attempts ends it if that does not help.
                _log.exception("output_broken", generation_id=record.generation_id, attempt=record.attempt)
                outputs.append(None)
                continue
            outputs.append(whole.token_ids if whole is not None else ())
            if whole is not None and record.attempt > 1:
                writes.append(ChunkWrite(generation_id=record.generation_id, attempt=record.attempt, output=whole))
        if writes:
            # Before the assignment: with the worker's own tokens this refills an emptied log exactly.
            await self._store.store_chunks_many(writes)
        return outputs
