"""Bounded polling of other processes."""

import asyncio
import time
from collections.abc import Awaitable, Callable

_POLL_S = 0.01


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + timeout_s
    while not await condition():
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True
