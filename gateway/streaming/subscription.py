"""The inbox of one client stream."""

import asyncio
from collections import deque
from collections.abc import Callable

from service_kit.delta import Cursor
from service_kit.errors import SluiceError
from service_kit.ids import GenerationId
from state_store.delta_log.port import LogView, Push
from state_store.model import GenerationRecord

News = Push | LogView | GenerationRecord


class Subscription:
    """Bounded news for one reader; filled by the hub, emptied by the stream, both on one event loop.

    When it is full the pushes in it are dropped and the reader is told that it is behind: a slow client costs the gateway
    no memory and nobody else anything, the log has what it missed.
    """

    def __init__(
        self, generation_id: GenerationId, cursor: Cursor, *, max_items: int, clock: Callable[[], float]
    ) -> None:
        self.generation_id = generation_id
        self.cursor = cursor
        """Where the reader is; kept up by the stream, so that the hub asks the log for the right part."""
        self.heard_at = clock()
        """When the last news came or the last check was made."""
        self.is_waiting = False
        self.is_attached = False
        self.num_dropped = 0
        self._clock = clock
        self._max_items = max_items
        self._items: deque[News] = deque()
        self._is_behind = False
        self._failure: SluiceError | None = None
        # A future for each wait: an Event costs twice as much, and this is once for every token.
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: News) -> None:
        """Adds news, or marks the reader as behind when there is no room."""
        self.heard_at = self._clock()
        if len(self._items) >= self._max_items:
            self.num_dropped += len(self._items) + 1
            self._items.clear()
            self._is_behind = True
        elif not self._is_behind:
            self._items.append(item)
        else:
            self.num_dropped += 1
        self._wake()

    def fail(self, error: SluiceError) -> None:
        """Ends the stream with `error` once what is in the inbox has been read."""
        self._failure = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def raise_failure(self) -> None:
        """Raises what `fail` was given, if anything."""
        if self._failure is not None:
            raise self._failure

    async def next(self) -> News | None:
        """The next news, or None when pushes were dropped and the log must be read. Raises what `fail` was given.

        A reader that is behind reads the log after this answer, and whatever is pushed from now on comes after it.
        """
        self.is_waiting = True
        try:
            while not (self._items or self._is_behind or self._failure):
                self._waiter = self._loop.create_future()
                await self._waiter
        finally:
            self.is_waiting = False
            self._waiter = None
        if self._is_behind:
            self._is_behind = False
            return None
        if self._items:
            return self._items.popleft()
        assert self._failure is not None
        raise self._failure
