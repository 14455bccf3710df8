"""Turns many single calls into few calls with lists: while one batch is under way, the next one gathers."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from service_kit.errors import Reason, UnavailableError

Item = TypeVar("Item")
Result = TypeVar("Result")


class Batcher(Generic[Item, Result]):
    """Waits for the running batch, never for a timer, so a lone call is not delayed.

    A batch that raises gives its error to each of its callers. At most `max_pending` items wait; more are refused with
    UnavailableError. A caller that goes away does not take its item back.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]],
        *,
        max_batch: int = 256,
        max_pending: int = 10_000,
    ) -> None:
        self._run = run
        self._max_batch = max_batch
        self._max_pending = max_pending
        self._pending: list[tuple[Item, asyncio.Future[Result]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def submit(self, item: Item) -> Result:
        """The result for `item`, once its batch is through."""
        if len(self._pending) >= self._max_pending:
            raise UnavailableError("too many requests wait for the store", reason=Reason.QUEUE_FULL)
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._pending.append((item, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._drain())
        return await asyncio.shield(future)

    async def _drain(self) -> None:
        while self._pending:
            batch, self._pending = self._pending[: self._max_batch], self._pending[self._max_batch :]
            try:
                results = await self._run([item for item, _ in batch])
            except Exception as error:  # noqa: BLE001  (whatever it is, its callers must hear it)
                for _, future in batch:
                    future.set_exception(error)
                    future.exception()  # a caller that went away must not make it "never retrieved"
            else:
                for (_, future), result in zip(batch, results, strict=True):
                    future.set_result(result)

    async def close(self) -> None:
        """Waits until everything handed in is through."""
        if self._worker is not None:
            await asyncio.wait([self._worker])
