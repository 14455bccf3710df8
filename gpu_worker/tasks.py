"""Running several things until the first of them ends."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def run_until_first(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Returns or raises as the first to end does, in order of arguments when several end at once; cancels the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await ended[0]
