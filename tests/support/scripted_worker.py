"""A worker that does only what a test tells it, over real gRPC."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc

from inference.internal.v1 import scheduler_pb2, scheduler_pb2_grpc, worker_pb2, worker_pb2_grpc
from service_kit.delta import Delta
from service_kit.ids import SessionId, new_session_id
from tests.support.polling import eventually

CAPABILITIES = worker_pb2.WorkerCapabilities(
    engine="scripted",
    model="scripted-model",
    model_revision="r1",
    precision="fp32",
    context_length=1000,
    vocab_size=1000,
    num_blocks=1000,
    block_size=16,
    max_running=16,
)
LOAD = worker_pb2.LoadReport(num_free_blocks=1000, num_blocks=1000, block_size=16)


class ScriptedWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Answers every Open of its session with a hello; everything else is sent by the test."""

    def __init__(self, session_id: SessionId | None = None, *, revision: str = "r1") -> None:
        self.session_id = session_id or new_session_id()
        self.received: list[worker_pb2.SessionRequest] = []
        self.held: list[worker_pb2.HeldAttempt] = []
        self.load = LOAD
        self.cached_prefixes: list[int] = []
        """As hello says them."""
        self.address = ""
        self.capabilities = worker_pb2.WorkerCapabilities()
        self.capabilities.CopyFrom(CAPABILITIES)
        self.capabilities.model_revision = revision
        self.num_refused = 0
        """Streams for other sessions than its own."""
        self._outgoing: asyncio.Queue[worker_pb2.SessionResponse | None] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None
        self._num_batches = 0

    async def start(self, address: str = "127.0.0.1:0") -> None:
        self._server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(address)
        await self._server.start()
        self.address = f"127.0.0.1:{port}"

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)

    async def announce(self, scheduler_address: str) -> scheduler_pb2.AnnounceWorkerResponse:
        async with grpc.aio.insecure_channel(scheduler_address) as channel:
            stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            response: scheduler_pb2.AnnounceWorkerResponse = await stub.AnnounceWorker(
                scheduler_pb2.AnnounceWorkerRequest(
                    address=self.address,
                    session_id=self.session_id,
                    worker_id="scripted",
                    capabilities=self.capabilities,
                )
            )
            return response

    async def Session(  # noqa: N802 - named by the proto
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[worker_pb2.SessionResponse]:
        opening = await anext(request_iterator)
        if opening.open.session_id != self.session_id:
            self.num_refused += 1
            await context.abort(grpc.StatusCode.ABORTED, f"this worker's session is {self.session_id}")
        self._outgoing = asyncio.Queue()
        self._num_batches = 0
        self.received.append(opening)
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            yield worker_pb2.SessionResponse(
                hello=worker_pb2.Hello(
                    session_id=self.session_id,
                    capabilities=self.capabilities,
                    load=self.load,
                    held=self.held,
                    cached_prefixes=self.cached_prefixes,
                )
            )
            while (response := await self._outgoing.get()) is not None:
                yield response
                if response.HasField("engine_lost"):
                    await context.abort(grpc.StatusCode.ABORTED, "the session ended with its engine")
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, request_iterator: Any) -> None:
        async for request in request_iterator:
            self.received.append(request)

    # -- what a test reads

    def received_of(self, kind: str) -> list[Any]:
        return [getattr(r, kind) for r in self.received if r.WhichOneof("message") == kind]

    def assignments(self) -> list[worker_pb2.Assignment]:
        return [each for assign in self.received_of("assign") for each in assign.assignments]

    def verdicts(self) -> list[worker_pb2.AttemptVerdict]:
        return [each for verdict in self.received_of("verdict") for each in verdict.attempts]

    def ended(self) -> list[tuple[str, int]]:
        return [(a.generation_id, a.attempt) for ack in self.received_of("end_ack") for a in ack.attempts]

    async def until(self, condition: Callable[[], bool]) -> None:
        await eventually(condition)

    # -- what a test makes it say

    def hang_up(self) -> None:
        """Ends the stream in good order, as after a drain."""
        self._outgoing.put_nowait(None)

    def lose_engine(self, *, untried: Iterable[tuple[str, int]] | None) -> None:
        """Ends the session as after a crash whose step ran these attempts first; None: nobody knows."""
        refs = [worker_pb2.AttemptRef(generation_id=name, attempt=attempt) for name, attempt in untried or ()]
        lost = worker_pb2.EngineLost(is_step_known=untried is not None, untried=refs)
        self._outgoing.put_nowait(worker_pb2.SessionResponse(engine_lost=lost))

    def heartbeat(self, *, added: Iterable[int] = (), removed: Iterable[int] = ()) -> None:
        """With digests of prefixes that came to and left its cache."""
        heartbeat = worker_pb2.Heartbeat(
            load=self.load, held=self.held, cached_prefixes_added=added, cached_prefixes_removed=removed
        )
        self._outgoing.put_nowait(worker_pb2.SessionResponse(heartbeat=heartbeat))

    def hold(self, generation_id: str, attempt: int, *, position: int, is_finished: bool = False) -> None:
        self.held = [each for each in self.held if each.attempt.generation_id != generation_id]
        ref = worker_pb2.AttemptRef(generation_id=generation_id, attempt=attempt)
        self.held.append(worker_pb2.HeldAttempt(attempt=ref, position=position, is_finished=is_finished))

    def say(
        self,
        generation_id: str,
        attempt: int,
        delta: Delta | None,
        *,
        finish_reason: str = "",
        output_tokens: int = 0,
        failure: str = "",
    ) -> None:
        """Sends one delta batch about one attempt; with `finish_reason` or `failure` it is the last word."""
        item = self.last_word(
            generation_id, attempt, finish_reason=finish_reason, output_tokens=output_tokens, failure=failure
        )
        if delta is not None:
            item.first, item.prev_chain, item.chain = delta.first, delta.prev_chain, delta.chain
            item.token_ids.extend(delta.token_ids)
            item.texts.extend(delta.texts)
        self.say_all([item])

    @staticmethod
    def last_word(
        generation_id: str, attempt: int, *, finish_reason: str = "", output_tokens: int = 0, failure: str = ""
    ) -> worker_pb2.AttemptDelta:
        item = worker_pb2.AttemptDelta(attempt=worker_pb2.AttemptRef(generation_id=generation_id, attempt=attempt))
        if finish_reason or failure:
            end = worker_pb2.AttemptEnd(finish_reason=finish_reason, failure=failure, output_tokens=output_tokens)
            item.end.CopyFrom(end)
        return item

    def say_all(self, items: Iterable[worker_pb2.AttemptDelta]) -> None:
        self._num_batches += 1
        batch = worker_pb2.DeltaBatch(batch=self._num_batches, deltas=list(items))
        self._outgoing.put_nowait(worker_pb2.SessionResponse(delta_batch=batch))
