"""One stream of a worker session: its window, its clock and its end. Nothing is queued for it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

from gpu_worker.attempts import AttemptBook, AttemptNews, AttemptRef, HeldAttempt
from gpu_worker.cached_prefixes import PrefixFeed
from gpu_worker.delta_pace import DeltaPace
from gpu_worker.engine.port import CacheChanges, LoadReport
from service_kit.errors import SluiceError, UnavailableError
from service_kit.ids import SchedulerId
from service_kit.logging import get_logger

MAX_UNACKNOWLEDGED_BATCHES = 8

_log = get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTimes:
    """`heartbeat`: between heartbeats. `after_end`: from an end to a heartbeat that says which memory it freed.
    `silence`: a scheduler unheard for so long is given up. `pace`: between tokens."""

    heartbeat: timedelta = timedelta(seconds=1)
    after_end: timedelta = timedelta(milliseconds=50)
    silence: timedelta = timedelta(seconds=2)
    pace: DeltaPace = field(default_factory=DeltaPace)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMessage:
    """Hello (`is_hello`) or heartbeat: how full the engine is, everything the session holds, and the digests of cached
    prefixes that came and went since the message before; to a hello all came."""

    is_hello: bool
    load: LoadReport
    is_draining: bool
    held: tuple[HeldAttempt, ...]
    prefixes: CacheChanges


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMessage:
    """New tokens and ends; batches count from 1 on each stream."""

    batch: int
    news: tuple[AttemptNews, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLostMessage:
    """The last message: the engine is lost. `untried` ran in its fatal step without having made a token before; None when
    it did not die in a step."""

    untried: tuple[AttemptRef, ...] | None


OutgoingMessage = StateMessage | BatchMessage | EngineLostMessage


class StreamSource(Protocol):
    """The session that a stream speaks for."""

    book: AttemptBook
    was_silent: bool

    def state_message(self, prefixes: CacheChanges, *, is_hello: bool) -> StateMessage: ...


class SessionStream:
    """One stream's window, clock and end. Its messages are cut from the session's records when they are asked for."""

    def __init__(
        self,
        session: StreamSource,
        *,
        owner_epoch: int,
        scheduler_id: SchedulerId,
        prefixes: PrefixFeed,
        times: StreamTimes,
        clock: Callable[[], float],
    ) -> None:
        self.owner_epoch = owner_epoch
        self.scheduler_id = scheduler_id
        self.wake = asyncio.Event()
        self._session = session
        self._prefixes = prefixes
        self._times = times
        self._clock = clock
        self._last_heard = clock()
        self._heartbeat_due: float | None = None
        self._tokens_due = 0.0
        """When all tokens go out that have gathered; before, only those that somebody waits for."""
        self._num_sent = 0
        self._num_acknowledged = 0
        self._is_closed = asyncio.Event()
        self._close_error: SluiceError | None = None
        self._farewell: EngineLostMessage | None = None

    @property
    def is_closed(self) -> bool:
        return self._is_closed.is_set()

    def heard(self) -> None:
        """The scheduler said something."""
        self._last_heard = self._clock()

    def acknowledge(self, batch: int) -> None:
        self._num_acknowledged = max(self._num_acknowledged, min(batch, self._num_sent))
        self.wake.set()

    def close(self, error: SluiceError | None) -> None:
        """Ends the stream, with an error or in good order; the first reason counts."""
        if not self._is_closed.is_set():
            self._close_error = error
            self._is_closed.set()

    def close_after(self, farewell: EngineLostMessage) -> None:
        """Sends what there is room for and the farewell; whoever sent it closes the stream. A peer that does not read is
        given up for its silence, as ever."""
        self._farewell = farewell
        self.wake.set()

    async def wait_closed(self) -> None:
        """Returns when the stream was closed in good order; raises the error it was closed with."""
        await self._is_closed.wait()
        if self._close_error is not None:
            raise self._close_error

    async def watch_silence(self) -> None:
        """Returns when the scheduler has been silent for too long; the stream is closed then."""
        limit = self._times.silence.total_seconds()
        while (rest := self._last_heard + limit - self._clock()) > 0:  # noqa: ASYNC110 - a time has no event
            await asyncio.sleep(rest)
        _log.warning("scheduler_silent", scheduler_id=self.scheduler_id)
        self._session.was_silent = True
        self.close(UnavailableError("the scheduler was silent for too long"))

    async def next_message(self) -> OutgoingMessage:
        """Hello first; then heartbeats when due, and batches while the window has room; a farewell last. One caller."""
        if self._heartbeat_due is None:
            self._heartbeat_due = self._clock() + self._times.heartbeat.total_seconds()
            return self._session.state_message(self._prefixes.take(), is_hello=True)
        while True:
            self.wake.clear()
            rest = self._heartbeat_due - self._clock()
            if rest <= 0:
                self._heartbeat_due = self._clock() + self._times.heartbeat.total_seconds()
                return self._session.state_message(self._prefixes.take(), is_hello=False)
            has_room = self._num_sent - self._num_acknowledged < MAX_UNACKNOWLEDGED_BATCHES
            if has_room and (news := self._take_news()):
                self._num_sent += 1
                if any(each.end is not None for each in news):
                    # Work that waits for memory is not to wait for the next regular heartbeat as well.
                    soon = self._clock() + self._times.after_end.total_seconds()
                    self._heartbeat_due = min(self._heartbeat_due, soon)
                return BatchMessage(batch=self._num_sent, news=news)
            if self._farewell is not None:
                return self._farewell
            if has_room and self._session.book.has_news:
                rest = min(rest, self._tokens_due - self._clock())
            try:
                async with asyncio.timeout(rest):
                    await self.wake.wait()
            except TimeoutError:
                continue

    def _take_news(self) -> tuple[AttemptNews, ...]:
        book, now_s = self._session.book, self._clock()
        if now_s >= self._tokens_due or self._farewell is not None:
            if book.has_news:
                self._tokens_due = now_s + self._times.pace.pause_s(len(book))
            return tuple(book.take_news())
        return tuple(book.take_news(only_urgent=True)) if book.has_urgent_news else ()
