"""Reading generations for callers: by either id, only the caller's own, with the output so far."""

from dataclasses import dataclass

from gateway.validation import parse_generation_ref
from inference.v1 import inference_pb2
from service_kit.delta import Cursor, Delta, join, rest_after
from service_kit.errors import NotFoundError, OutOfRangeError, Reason
from service_kit.ids import GenerationId, RequestId, TenantId
from state_store.delta_log.port import DeltaLogReader, LogView
from state_store.model import GenerationRecord
from state_store.ports import GenerationStore

_NOT_FOUND = "no such generation"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordWithOutput:
    """A record and the whole output known at that moment; `output` is None when there is none yet, or none any more because
    it was not to be stored."""

    record: GenerationRecord
    output: Delta | None


class RecordReader:
    """Reads the durable record, and the log of live generations."""

    def __init__(self, *, store: GenerationStore, log: DeltaLogReader) -> None:
        self._store = store
        self._log = log

    async def find(self, tenant_id: TenantId, ref: inference_pb2.GenerationRef) -> GenerationRecord:
        """Raises InvalidArgumentError, NotFoundError for an unknown one and another tenant's alike, and OutOfRangeError for
        one whose record is no longer kept: the ledger, which is, knows whose it was."""
        named = parse_generation_ref(ref)
        if ref.WhichOneof("id") == "request_id":
            record = await self._store.find_by_request_id(tenant_id, RequestId(named))
        else:
            (record,) = await self._store.get_many([GenerationId(named)])
            if record is None:
                ledger = await self._store.ledger_of(GenerationId(named))
                if any(row.tenant_id == tenant_id for row in ledger):
                    raise OutOfRangeError("the generation is no longer kept", reason=Reason.OUTPUT_NOT_KEPT)
        if record is None or record.tenant_id != tenant_id:
            raise NotFoundError(_NOT_FOUND)
        return record

    async def with_output(self, record: GenerationRecord) -> RecordWithOutput:
        """The output of a final record from the store, of a live one from store and log."""
        if not record.state.is_terminal:
            (view,) = await self._log.read_many([(record.generation_id, 0)])
            if view.terminal is None:
                return RecordWithOutput(record=record, output=await self._live_output(view))
            # It ended between the two reads; the row was committed before the log was closed.
            (ended,) = await self._store.get_many([record.generation_id])
            record = ended or record
        if record.texts_deleted_at is not None:
            return RecordWithOutput(record=record, output=None)
        (output,) = await self._store.read_output_many([record.generation_id])
        if record.output_tokens and (output is None or output.last < record.output_tokens):
            raise OutOfRangeError("the output is no longer kept", reason=Reason.OUTPUT_NOT_KEPT)
        return RecordWithOutput(record=record, output=output)

    async def _live_output(self, view: LogView) -> Delta | None:
        """The log, behind what is stored of earlier attempts when it begins later or is gone."""
        if view.is_present and view.base.sequence_number == 0:
            return join(view.deltas)
        (stored,) = await self._store.read_output_many([view.generation_id])
        cursor = stored.end if stored is not None else Cursor()
        parts = [stored] if stored is not None else []
        for delta in view.deltas:
            rest = rest_after(cursor, delta)
            if rest is not None:
                parts.append(rest)
                cursor = rest.end
        return join(parts)
