"""The client for programs without an event loop: the same calls, blocking."""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

from inference.v1 import types_pb2
from sluice.client import ClientSettings, SluiceClient
from sluice.client_events import Accepted, Event, Input

ResultT = TypeVar("ResultT")


class SyncSluiceClient:
    """Runs a `SluiceClient` on an event loop in a thread of its own. Close it, or use it as a context manager."""

    def __init__(self, settings: ClientSettings) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sluice-client", daemon=True)
        self._thread.start()
        self._client = SluiceClient(settings)
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close connections and end the thread. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate(self, model: str, source: Input, **options: Any) -> Iterator[Event]:
        """As `SluiceClient.generate`, with the same options."""
        return self._iterate(self._client.generate(model, source, **options))

    def stream(self, **options: Any) -> Iterator[Event]:
        """As `SluiceClient.stream`, with the same options."""
        return self._iterate(self._client.stream(**options))

    def create(self, model: str, source: Input, **options: Any) -> Accepted:
        return self._run(self._client.create(model, source, **options))

    def get(self, *, generation_id: str = "", request_id: str = "") -> types_pb2.Generation:
        return self._run(self._client.get(generation_id=generation_id, request_id=request_id))

    def cancel(self, *, generation_id: str = "", request_id: str = "") -> str:
        return self._run(self._client.cancel(generation_id=generation_id, request_id=request_id))

    def list_models(self) -> list[types_pb2.Model]:
        return self._run(self._client.list_models())

    def _run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C while waiting: nothing may go on in the thread
            raise

    def _iterate(self, events: AsyncIterator[Event]) -> Iterator[Event]:
        try:
            while (event := self._run(_next(events))) is not None:
                yield event
        finally:
            self._run(_close(events))


async def _next(events: AsyncIterator[Event]) -> Event | None:
    return await anext(events, None)


async def _close(events: Any) -> None:
    await events.aclose()
