"""The wire of one worker session: one bidirectional stream, an ordered and bounded outbox, and its end told in one word."""

import asyncio
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Any, cast

import grpc

from inference.internal.v1 import worker_pb2, worker_pb2_grpc
from service_kit.grpc_client import open_channel, outgoing_metadata
from service_kit.internal_access import InternalAccess
from service_kit.logging import get_logger

_log = get_logger()
_EOF: Any = cast("Any", grpc.aio).EOF  # the stubs do not show it

MAX_OUTBOX = 10_000
"""Messages to a worker that does not read; when full the stream is given up."""


class StreamEnd(StrEnum):
    """Why a stream ended."""

    BROKEN = "BROKEN"
    REFUSED = "REFUSED"
    """The worker serves a newer owner, or another session by now."""
    CLOSED = "CLOSED"
    """The worker ended the stream in good order: it has drained."""


class SessionStream:
    """One attempt to talk to a worker. `run` opens the stream and hands every response to `on_response`, in order."""

    def __init__(self, address: str, opening: worker_pb2.Open, *, access: InternalAccess) -> None:
        self._address = address
        self._access = access
        self._outbox: asyncio.Queue[worker_pb2.SessionRequest] = asyncio.Queue(MAX_OUTBOX)
        self._outbox.put_nowait(worker_pb2.SessionRequest(open=opening))
        self._is_overrun = asyncio.Event()

    def send(self, request: worker_pb2.SessionRequest) -> None:
        """Puts a message behind those sent before. Never blocks; an overrun ends the stream."""
        try:
            self._outbox.put_nowait(request)
        except asyncio.QueueFull:
            self._is_overrun.set()

    async def run(self, on_response: Callable[[worker_pb2.SessionResponse], Awaitable[None]]) -> StreamEnd:
        """Runs until the stream ends. What `on_response` raises ends it and is raised."""
        try:
            channel = open_channel(self._address, internal_token=self._access.token, tls=self._access.client_tls)
        except OSError as error:  # certificates that are being replaced; the session is announced again
            _log.warning("certificate_not_read", address=self._address, error=str(error))
            return StreamEnd.BROKEN
        try:
            stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
            call = stub.Session(metadata=outgoing_metadata(self._access.token))
            tasks = [
                asyncio.create_task(self._read(call, on_response)),
                asyncio.create_task(self._write(call)),
                asyncio.create_task(self._watch_overrun()),
            ]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                return await _first_result(done)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                call.cancel()
        finally:
            await channel.close(None)

    async def _read(self, call: Any, on_response: Callable[[worker_pb2.SessionResponse], Awaitable[None]]) -> StreamEnd:
        try:
            while (response := await call.read()) is not _EOF:
                await on_response(response)
            code = await call.code()
        except grpc.aio.AioRpcError as error:
            code = error.code()
        if code is grpc.StatusCode.OK:
            return StreamEnd.CLOSED
        _log.debug("session_stream_ended", address=self._address, code=code.name)
        return StreamEnd.REFUSED if code is grpc.StatusCode.ABORTED else StreamEnd.BROKEN

    async def _write(self, call: Any) -> StreamEnd:
        try:
            while True:
                await call.write(await self._outbox.get())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The reader learns the status; it knows more than a failed write does.
            await asyncio.Event().wait()
            raise

    async def _watch_overrun(self) -> StreamEnd:
        await self._is_overrun.wait()
        _log.error("session_outbox_overrun", address=self._address)
        return StreamEnd.BROKEN


async def _first_result(done: set["asyncio.Task[StreamEnd]"]) -> StreamEnd:
    return await next(iter(done))
