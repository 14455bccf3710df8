"""A scheduler that says what the test tells it to, over real gRPC."""

import asyncio
from collections import defaultdict

import grpc

from inference.internal.v1 import scheduler_pb2, scheduler_pb2_grpc, worker_pb2, worker_pb2_grpc
from service_kit.delta import Delta, join
from service_kit.errors import AbortedError
from service_kit.grpc_client import INTERNAL_TOKEN_KEY, open_channel
from service_kit.grpc_server import GrpcServer
from tests.support.polling import eventually
from tests.support.tiny_models import encode

READ_S = 10
TOKEN = "token-of-tests"
"""What worker processes ask for."""
METADATA = ((INTERNAL_TOKEN_KEY, TOKEN),)


class ScriptedStream:
    """One session stream. Reads in the background; keeps every message, and per generation what its log would hold."""

    def __init__(
        self, address, *, session_id, owner_epoch=1, scheduler_id="sched", answers=True, acks=True, metadata=METADATA
    ):
        self.messages: list[worker_pb2.SessionResponse] = []
        self.deltas: dict[str, list[Delta]] = defaultdict(list)
        self.ends: dict[str, worker_pb2.AttemptEnd] = {}
        self.answers = answers
        self.acks = acks
        self.code = None
        self.has_lost_write = False
        self.channel = open_channel(address)
        self.call = worker_pb2_grpc.WorkerServiceStub(self.channel).Session(metadata=metadata)
        self.opening = worker_pb2.Open(session_id=session_id, owner_epoch=owner_epoch, scheduler_id=scheduler_id)
        self.writing = asyncio.Lock()
        self.opened = asyncio.Event()
        self.reader = asyncio.create_task(self._read())

    async def __aenter__(self):
        await self.opened.wait()
        return self

    async def __aexit__(self, *_):
        self.call.cancel()
        await asyncio.gather(self.reader, return_exceptions=True)
        await self.channel.close(None)

    async def _read(self):
        try:
            try:
                await self.say(open=self.opening)
            finally:
                self.opened.set()
            while (response := await self.call.read()) is not grpc.aio.EOF:
                self.messages.append(response)
                await self._take(response)
            self.code = await self.call.code()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            self.code = await self.call.code()

    async def _take(self, response):
        match response.WhichOneof("message"):
            case "delta_batch":
                for news in response.delta_batch.deltas:
                    self._book(news)
                if self.answers and self.acks:
                    await self.ack(response.delta_batch.batch)
            case "heartbeat" if self.answers:
                await self.say(verdict=worker_pb2.Verdict())

    def _book(self, news):
        generation_id = news.attempt.generation_id
        if news.first:
            delta = Delta(
                first=news.first,
                token_ids=tuple(news.token_ids),
                texts=tuple(news.texts),
                prev_chain=news.prev_chain,
                chain=news.chain,
            )
            self.deltas[generation_id].append(delta)
        if news.HasField("end"):
            self.ends[generation_id] = news.end

    # -- what it saw

    def of(self, kind):
        return [getattr(message, kind) for message in self.messages if message.WhichOneof("message") == kind]

    def output(self, generation_id="g") -> Delta | None:
        """Joined; a gap or a wrong chain raises."""
        return join(self.deltas[generation_id])

    async def hello(self) -> worker_pb2.Hello:
        await eventually(lambda: bool(self.messages))
        return self.messages[0].hello

    async def end(self, generation_id="g") -> worker_pb2.AttemptEnd:
        await eventually(lambda: generation_id in self.ends)
        return self.ends[generation_id]

    async def position(self, number, generation_id="g"):
        await eventually(lambda: bool(self.deltas[generation_id]) and self.deltas[generation_id][-1].last >= number)

    async def closes_with(self, code):
        """A write that meets the end of the stream makes gRPC's client report INTERNAL instead of what the server said."""
        await eventually(lambda: self.code is not None)
        assert self.code is code or (self.has_lost_write and self.code is grpc.StatusCode.INTERNAL), self.code

    # -- what it says

    async def say(self, **message):
        async with self.writing:  # gRPC takes one write at a time
            try:
                await self.call.write(worker_pb2.SessionRequest(**message))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                self.has_lost_write = True
                raise

    async def assign(self, *assignments):
        await self.say(assign=worker_pb2.Assign(assignments=assignments))

    async def cancel(self, generation_id="g", attempt=1):
        cancel = worker_pb2.Cancel(attempts=[ref(generation_id, attempt)])
        await self.say(cancel=cancel)

    async def ack(self, batch):
        await self.say(ack=worker_pb2.Ack(batch=batch))

    async def end_ack(self, generation_id="g", attempt=1):
        end_ack = worker_pb2.EndAck(attempts=[ref(generation_id, attempt)])
        await self.say(end_ack=end_ack)

    async def verdict(self, action, *, resend_from=0, generation_id="g", attempt=1):
        verdict = worker_pb2.AttemptVerdict(attempt=ref(generation_id, attempt), action=action, resend_from=resend_from)
        await self.say(verdict=worker_pb2.Verdict(attempts=[verdict]))

    async def drain(self):
        await self.say(drain=worker_pb2.Drain())


def ref(generation_id="g", attempt=1):
    return worker_pb2.AttemptRef(generation_id=generation_id, attempt=attempt)


def assignment(
    generation_id="g", attempt=1, *, prompt="hello", output=(), nonce=5, traceparent="", prefix_salt="", **sampling
):
    fields = {"max_output_tokens": 20, "temperature": 0, "top_p": 1} | sampling
    return worker_pb2.Assignment(
        generation_id=generation_id,
        attempt=attempt,
        prompt_token_ids=encode(prompt),
        output_token_ids=output,
        sampling=worker_pb2.SamplingParams(**fields),
        nonce=nonce,
        traceparent=traceparent,
        prefix_salt=prefix_salt,
    )


class AnnouncementDesk(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Takes announcements, and opens a stream for each while `opens` is true."""

    def __init__(self, epochs) -> None:
        self.announcements: list[scheduler_pb2.AnnounceWorkerRequest] = []
        self.streams: list[ScriptedStream] = []
        self.over: set[str] = set()
        self.opens = True
        self.answers = True
        self.epochs = epochs

    async def AnnounceWorker(self, request, context):  # noqa: N802 - named by the proto
        self.announcements.append(request)
        if request.session_id in self.over:
            raise AbortedError("the session is over")
        epoch = next(self.epochs)  # as the sessions' rows would: never twice, whichever replica asks
        if self.opens:
            stream = ScriptedStream(
                request.address,
                session_id=request.session_id,
                owner_epoch=epoch,
                scheduler_id=f"s{id(self)}",
                answers=self.answers,
            )
            self.streams.append(stream)
        return scheduler_pb2.AnnounceWorkerResponse(scheduler_id="s", owner_epoch=epoch)

    async def stream(self, number=0, *, within_s=30) -> ScriptedStream:
        """The stream of that number, once the worker said hello on it."""
        await eventually(lambda: len(self.streams) > number and bool(self.streams[number].messages), within_s=within_s)
        return self.streams[number]

    async def serve(self, listen="127.0.0.1:0"):
        """A running server and its address."""
        server = GrpcServer(
            listen=listen,
            services={
                "inference.internal.v1.SchedulerService": lambda target: (
                    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self, target)
                )
            },
        )
        return server, f"127.0.0.1:{await server.start()}"

    async def close(self):
        for stream in self.streams:
            await stream.__aexit__()
