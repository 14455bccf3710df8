"""TCP connections between two processes that can be cut, or held up so that nothing passes."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

_CHUNK_BYTES = 1 << 16


@dataclass(eq=False, slots=True)
class _Passage:
    """One connection through a link. While `gate` is closed no byte passes, and no end of a side either."""

    gate: asyncio.Event
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    def abort(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


class Link:
    """Listens on 127.0.0.1 and passes connections on to `target` ("host:port"), asked for at each connection."""

    def __init__(self, name: str, target: Callable[[], str]) -> None:
        self.name = name
        self._target = target
        self._server: asyncio.Server | None = None
        self._port = 0
        self._passages: set[_Passage] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._holds_new = False

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def num_connections(self) -> int:
        return len(self._passages)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        self.release()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Resets every connection there is; new ones are served."""
        for passage in list(self._passages):
            passage.abort()

    def hold(self, *, holds_new: bool = True) -> None:
        """From now on nothing passes over the connections there are, nor over new ones if `holds_new`."""
        self._holds_new = holds_new
        for passage in self._passages:
            passage.gate.clear()

    def release(self) -> None:
        """What was held up passes now, late and in order."""
        self._holds_new = False
        for passage in self._passages:
            passage.gate.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        passage = _Passage(gate=asyncio.Event(), writers=[writer])
        if not self._holds_new:
            passage.gate.set()
        self._passages.add(passage)
        try:
            await passage.gate.wait()
            host, port = self._target().rsplit(":", 1)
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            passage.writers.append(far_writer)
            await asyncio.gather(_pump(reader, far_writer, passage.gate), _pump(far_reader, writer, passage.gate))
        except (OSError, asyncio.CancelledError):
            pass  # the other side is away, or the link is being stopped: the caller sees a reset
        finally:
            self._passages.discard(passage)
            self._tasks.discard(task)
            passage.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event) -> None:
    """Copies one direction; its end closes the other side behind what was copied."""
    while True:
        data = await reader.read(_CHUNK_BYTES)
        await gate.wait()
        if not data:
            break
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()
        await writer.wait_closed()
