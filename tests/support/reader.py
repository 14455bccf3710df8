"""Reads streams of the client in the background."""

import asyncio
from collections.abc import AsyncIterator, Callable

from service_kit.delta import Cursor
from sluice.client_events import Accepted, Event, Finished, Output, TokenLogprob


class Reader:
    """Collects the events of one stream; tests wait for positions instead of sleeping."""

    def __init__(self, events: AsyncIterator[Event]) -> None:
        self.events: list[Event] = []
        self._news = asyncio.Condition()
        self._is_over = False
        self._task = asyncio.create_task(self._read(events))

    async def _read(self, events: AsyncIterator[Event]) -> None:
        try:
            async for event in events:
                async with self._news:
                    self.events.append(event)
                    self._news.notify_all()
        finally:
            async with self._news:
                self._is_over = True
                self._news.notify_all()

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token_id for event in self.events if isinstance(event, Output) for token_id in event.token_ids)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return tuple(logprob for event in self.events if isinstance(event, Output) for logprob in event.logprobs)

    @property
    def top_ids(self) -> tuple[int, ...]:
        """The most probable token at each position: of the simulated engine, which is certain, the output token itself."""
        return tuple(logprob.top[0].token_id for logprob in self.logprobs)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Output))

    @property
    def accepted(self) -> Accepted:
        return next(event for event in self.events if isinstance(event, Accepted))

    @property
    def finished(self) -> Finished:
        return next(event for event in self.events if isinstance(event, Finished))

    @property
    def cursor(self) -> Cursor:
        return next((event.cursor for event in reversed(self.events) if isinstance(event, Output)), Cursor())

    async def until_accepted(self) -> Accepted:
        await self._until(lambda: bool(self.events))
        return self.accepted

    async def until_token(self, count: int, timeout_s: float = 30.0) -> None:
        """Returns once at least `count` tokens are here."""
        await self._until(lambda: len(self.token_ids) >= count, timeout_s)

    async def until_end(self, timeout_s: float = 60.0) -> Finished:
        """Raises what the stream raised."""
        async with asyncio.timeout(timeout_s):
            await asyncio.shield(self._task)
        return self.finished

    async def leave(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _until(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        async with asyncio.timeout(timeout_s):
            async with self._news:
                await self._news.wait_for(lambda: condition() or self._is_over)
        if not condition():
            await self._task
            raise AssertionError(f"the stream ended early, with {len(self.token_ids)} tokens: {self.finished}")
