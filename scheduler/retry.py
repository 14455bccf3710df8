"""Patience with stores: the stream stays up and the work waits; nothing is dropped."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from service_kit.errors import UnavailableError
from service_kit.logging import get_logger

Result = TypeVar("Result")

_log = get_logger()
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


async def until_available(call: Callable[[], Awaitable[Result]]) -> Result:
    """Repeats `call` while a store is unavailable, with growing, jittered pauses. Ends by success or by cancellation, so
    the caller owns its lifetime; every call it is given must be safe to repeat."""
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return await call()
        except UnavailableError as error:
            _log.warning("store_unavailable", reason=error.reason, pause_s=pause_s)
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311  (jitter, not a secret)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
