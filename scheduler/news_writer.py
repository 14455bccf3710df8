"""One session's tokens and ends on their way into the stores: in order, patiently, acknowledged when done."""

import asyncio
from collections.abc import Callable

from inference.internal.v1 import worker_pb2
from scheduler.attempt_table import AttemptTable
from scheduler.codec import decode_batch, encode_ref, encode_verdict
from scheduler.coordinator import ABORT, AttemptNews, Coordinator, EndResult, NewsResult, Verdict, resend_from
from scheduler.output_charges import OutputCharges
from scheduler.policy import WorkerEnd
from scheduler.retry import until_available
from scheduler.session_stream import SessionStream
from state_store.ports import AttemptRef

BROKEN_END_PAUSE_S = 1.0
"""Until a worker is asked again for an end that could not be dealt with."""


class NewsWriter:
    """Appends batch after batch; carries last words into Postgres beside that, several at once.

    Bounded by the worker's window: at most 8 batches of a stream are unacknowledged.
    """

    def __init__(
        self, *, table: AttemptTable, coordinator: Coordinator, charges: OutputCharges, on_room: Callable[[], None]
    ) -> None:
        self._table = table
        self._coordinator = coordinator
        self._charges = charges
        self._on_room = on_room
        self._batches: asyncio.Queue[tuple[SessionStream, worker_pb2.DeltaBatch]] = asyncio.Queue()
        self._ends: dict[AttemptRef, asyncio.Task[None]] = {}

    def put(self, stream: SessionStream, batch: worker_pb2.DeltaBatch) -> None:
        """Takes a batch; its acknowledgement goes to the stream it came on."""
        self._batches.put_nowait((stream, batch))

    def is_ending(self, ref: AttemptRef) -> bool:
        return ref in self._ends

    async def run(self) -> None:
        """Runs until cancelled. Raises ValueError for a malformed batch: its worker cannot be trusted with more."""
        try:
            while True:
                stream, batch = await self._batches.get()
                news = decode_batch(batch)
                self._table.note_produced(item.ref for item in news)
                results = await until_available(_Append(self._coordinator, news))
                self._apply(stream, news, results)
                stream.send(worker_pb2.SessionRequest(ack=worker_pb2.Ack(batch=batch.batch)))
        finally:
            for task in self._ends.values():
                task.cancel()
            await asyncio.gather(*self._ends.values(), return_exceptions=True)

    def _apply(self, stream: SessionStream, news: list[AttemptNews], results: list[NewsResult]) -> None:
        for item, result in zip(news, results, strict=True):
            if result.num_appended and (known := self._table.find(item.ref)) is not None:
                self._charges.note(known.record.model_key, known.record.tenant_id, result.num_appended)
        corrections = {
            item.ref: result for item, result in zip(news, results, strict=True) if result.verdict is not Verdict.KEEP
        }
        for ref, result in corrections.items():
            if result.verdict is Verdict.ABORT:
                self._table.forget(ref)
        if corrections:
            stream.send(encode_verdict(corrections))
        for item in news:
            if item.delta is not None and item.ref not in corrections and self._table.note_added(item.ref):
                self._on_room()
            if item.end is not None and item.ref not in corrections and item.ref not in self._ends:
                self._ends[item.ref] = asyncio.create_task(self._end(stream, item.ref, item.end))

    async def _end(self, stream: SessionStream, ref: AttemptRef, end: WorkerEnd) -> None:
        """Commits a last word; then the worker may forget the attempt. If this process dies first, it still holds it."""
        try:
            outcome = await until_available(lambda: self._coordinator.end(ref, end))
            if outcome.result is EndResult.BROKEN:
                await asyncio.sleep(BROKEN_END_PAUSE_S)
        finally:
            self._ends.pop(ref, None)
        if outcome.result is EndResult.BROKEN:
            stream.send(encode_verdict({ref: resend_from(end.output_tokens + 1)}))
            return
        if outcome.result is EndResult.INCOMPLETE:
            stream.send(encode_verdict({ref: resend_from(outcome.resend_from)}))
            return
        self._table.forget(ref)
        if outcome.result is EndResult.COMMITTED:
            stream.send(worker_pb2.SessionRequest(end_ack=worker_pb2.EndAck(attempts=[encode_ref(ref)])))
        else:
            stream.send(encode_verdict({ref: ABORT}))
        self._on_room()


class _Append:
    """One append, repeatable; a class so that a loop's variable is not captured by a closure."""

    def __init__(self, coordinator: Coordinator, news: list[AttemptNews]) -> None:
        self._coordinator = coordinator
        self._news = news

    async def __call__(self) -> list[NewsResult]:
        return await self._coordinator.append(self._news)
