"""Bounded waiting for what another process or task does."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

Answer = TypeVar("Answer")


async def eventually(condition: Callable[[], bool], *, within_s: float = 10.0) -> None:
    """Returns when the condition holds; raises TimeoutError when it does not come to hold in time."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


async def eventually_answers(question: Callable[[], Awaitable[Answer]], *, within_s: float = 10.0) -> Answer:
    """The first answer that is true; raises TimeoutError when there is none in time."""
    async with asyncio.timeout(within_s):
        while not (answer := await question()):  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)
        return answer
