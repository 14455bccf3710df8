"""Streams of one trial as their client sees them: what arrived, and when."""

import asyncio
import itertools
import time

from sluice.client import SluiceClient
from sluice.client_events import Accepted, Output, Sampling
from tests.support.stack import MODEL, simulated_output

MAX_OUTPUT_TOKENS = 4000
"""More than any stream makes during a trial; it is cancelled at the end."""
_SEED = 3


class WrongOutputError(Exception):
    """The stream continued with other tokens than an undisturbed one has."""


class WatchedStream:
    """Reads one generation in the background and notes the moment (monotonic seconds) of every arrival."""

    def __init__(self, client: SluiceClient, prompt: str) -> None:
        self.prompt = prompt
        self.generation_id = ""
        self.arrivals_s: list[float] = []
        self.token_ids: list[int] = []
        self._client = client
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        sampling = Sampling(max_output_tokens=MAX_OUTPUT_TOKENS, seed=_SEED)
        try:
            async for event in self._client.generate(MODEL, self.prompt, sampling=sampling):
                if isinstance(event, Accepted):
                    self.generation_id = event.generation_id
                elif isinstance(event, Output):
                    self.arrivals_s.append(time.monotonic())
                    self.token_ids.extend(event.token_ids)
                self._news.set()
        finally:
            self._news.set()

    @property
    def num_context_tokens(self) -> int:
        """What another worker has to compute before it can go on."""
        return len(self.prompt) + 1 + len(self.token_ids)

    async def until_tokens(self, count: int) -> None:
        while len(self.token_ids) < count:
            await self._wait()

    async def until_arrival_after(self, at_s: float) -> None:
        while not self.arrivals_s or self.arrivals_s[-1] <= at_s:
            await self._wait()

    async def _wait(self) -> None:
        """For anything new. Raises what the stream raised."""
        if self._task.done():
            await self._task
            raise WrongOutputError(f"the stream of {self.prompt[:20]!r} ended early")
        self._news.clear()
        await self._news.wait()

    def resumed_after_s(self, fault_s: float) -> float:
        """From the fault to the end of the longest silence that ended after it. Tokens that were on their way when the
        fault happened arrive after it too; the silence begins behind them."""
        after = [(right - left, right) for left, right in itertools.pairwise(self.arrivals_s) if right > fault_s]
        return max(after)[1] - fault_s

    def check(self) -> None:
        """Raises WrongOutputError."""
        if tuple(self.token_ids) != simulated_output(self.prompt, seed=_SEED, count=len(self.token_ids)):
            raise WrongOutputError(f"the stream of {self.prompt[:20]!r} has other tokens than an undisturbed one")

    async def end(self) -> None:
        """Cancels the generation and waits for the end of the stream."""
        await self._client.cancel(generation_id=self.generation_id)
        await self._task
