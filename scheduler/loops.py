"""The scheduler's periodic work."""

import asyncio
from collections.abc import Awaitable, Callable

from service_kit.errors import UnavailableError
from service_kit.logging import get_logger

_log = get_logger()


async def every(interval_s: float, run_once: Callable[[], Awaitable[None]], *, name: str) -> None:
    """Calls `run_once` again and again, `interval_s` after the last one ended, until cancelled. A round that fails is
    logged; the next one starts from what the stores say."""
    while True:
        try:
            await run_once()
        except UnavailableError as error:
            _log.warning("loop_unavailable", loop=name, reason=error.reason)
        except Exception:  # noqa: BLE001 - one bad round must not end the scheduler
            _log.exception("loop_failed", loop=name)
        await asyncio.sleep(interval_s)
