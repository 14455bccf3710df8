"""A connection to Postgres that is lost at the worst moment: what was asked is done, and the answer never arrives."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_READY = b"Z\x00\x00\x00\x05I"
"""The server's word, of its protocol, that it waits for a query and is in no transaction."""


class LossyLink:
    """Passes connections on to `port` of 127.0.0.1. Set `fatal` to lose the answer to the next request that has it."""

    def __init__(self, port: int) -> None:
        self.fatal: bytes | None = None
        self.num_lost = 0
        self._far_port = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._far_port)
        is_fatal = asyncio.Event()
        back = asyncio.create_task(self._pass_back(far_reader, writer, is_fatal))
        try:
            while data := await reader.read(1 << 16):
                if self.fatal is not None and self.fatal in data:
                    self.fatal = None
                    is_fatal.set()
                far_writer.write(data)
        except (OSError, asyncio.CancelledError):
            pass  # either end is gone: the other one sees a reset
        finally:
            self._tasks.discard(task)
            back.cancel()
            far_writer.transport.abort()
            writer.transport.abort()

    async def _pass_back(
        self, far_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_fatal: asyncio.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await far_reader.read(1 << 16):
                if not is_fatal.is_set():
                    writer.write(data)
                elif _READY in data:
                    self.num_lost += 1
                    break
        writer.transport.abort()


@asynccontextmanager
async def lossy_link(port: int) -> AsyncIterator[LossyLink]:
    link = LossyLink(port)
    await link.start()
    try:
        yield link
    finally:
        await link.stop()
