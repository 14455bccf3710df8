"""Does the store answer? Told within a second to callers whose own caller waits, whatever their own statement is doing.

A statement may take its time; a store that does not answer the smallest question within half a second is away. The two are
told apart by a probe beside the call, so that a large batch is not taken for an outage and an outage not for a large batch.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from service_kit.logging import get_logger
from state_store.errors import StoreUnavailableError

Result = TypeVar("Result")

_log = get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class PulseSettings:
    """suspicion: a call that takes longer starts the probe. answer: a probe that takes longer means that the store is
    away. pause: between two probes. A probe that has not ended after `give_up` is made anew."""

    suspicion: timedelta = timedelta(milliseconds=150)
    answer: timedelta = timedelta(milliseconds=500)
    pause: timedelta = timedelta(milliseconds=250)
    give_up: timedelta = timedelta(seconds=5)


_TICKS = 10
"""The patience with a probe is counted in turns of the event loop: one that is late itself does not blame the store."""
_DEFAULT_SETTINGS = PulseSettings()


class Pulse:
    """Mutable owner of the probing task, which runs while a call is slow or the store is away.

    `probe` asks the store something small and raises whatever it likes when there is no answer. It is cancelled when it
    is given up, and not waited for.
    """

    def __init__(self, probe: Callable[[], Awaitable[None]], *, settings: PulseSettings = _DEFAULT_SETTINGS) -> None:
        self._ask = probe
        self._settings = settings
        self._silent = asyncio.Event()
        self._num_waiting = 0
        self._watching: asyncio.Task[None] | None = None

    @property
    def is_silent(self) -> bool:
        """Whether the store was found not to answer, and has not answered since."""
        return self._silent.is_set()

    async def while_answering(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """The call's result. Raises what it raises; and StoreUnavailableError at once when the store is away, or as soon as
        it is found to be: then nothing is known about the call, which is cancelled and not waited for."""
        if self.is_silent:
            raise _unavailable()
        work = asyncio.ensure_future(call())
        try:
            done, _ = await asyncio.wait({work}, timeout=self._settings.suspicion.total_seconds())
            if not done:
                await self._wait_suspiciously(work)
            if work.done():
                return work.result()
            raise _unavailable()
        finally:
            if not work.done():
                work.cancel()
                work.add_done_callback(_retrieve)

    async def close(self) -> None:
        """Ends the probing. Idempotent."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._watching = None

    async def _wait_suspiciously(self, work: asyncio.Future[Result]) -> None:
        """Until the work is done, or the store is known to be away."""
        silence = asyncio.ensure_future(self._silent.wait())
        either: set[asyncio.Future[Any]] = {work, silence}
        self._num_waiting += 1
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._num_waiting -= 1
            silence.cancel()

    async def _watch(self) -> None:
        """Until nobody waits and the store answers."""
        while self._num_waiting or self.is_silent:
            await self._probe_once()
            await asyncio.sleep(self._settings.pause.total_seconds())

    async def _probe_once(self) -> None:
        probe = asyncio.ensure_future(self._ask())
        probe.add_done_callback(_retrieve)
        try:
            for _ in range(_TICKS):
                await asyncio.wait({probe}, timeout=self._settings.answer.total_seconds() / _TICKS)
                if probe.done():
                    break
            if not probe.done():
                self._note(is_silent=True)
                await asyncio.wait({probe}, timeout=self._settings.give_up.total_seconds())
            self._note(is_silent=not probe.done() or probe.cancelled() or probe.exception() is not None)
        finally:
            probe.cancel()

    def _note(self, *, is_silent: bool) -> None:
        if is_silent == self.is_silent:
            return
        if is_silent:
            _log.warning("store_silent")
            self._silent.set()
        else:
            _log.info("store_answers")
            self._silent.clear()


def _unavailable() -> StoreUnavailableError:
    return StoreUnavailableError("Postgres does not answer")


def _retrieve(task: asyncio.Future[Result]) -> None:
    """Nobody waits for it any more; its error must not count as overlooked."""
    if not task.cancelled():
        task.exception()
