"""Keeps a worker session owned: announces it to one scheduler after another until one of them opens the stream."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import grpc

from gpu_worker.codec import encode_capabilities
from gpu_worker.session import WorkerSession
from inference.internal.v1 import scheduler_pb2
from service_kit.logging import get_logger

Announce = Callable[[scheduler_pb2.AnnounceWorkerRequest], Awaitable[scheduler_pb2.AnnounceWorkerResponse]]

_log = get_logger()


class SessionOverError(Exception):
    """Schedulers count this session as over: the worker must come back as a new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerTarget:
    """One scheduler replica. `announce` raises AioRpcError, and must not take longer than `AnnounceTimes.answer`."""

    address: str
    announce: Announce


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceTimes:
    """`stream`: from an accepted announcement to the stream. `retry`: after a replica that did not help."""

    answer: timedelta = timedelta(seconds=2)
    stream: timedelta = timedelta(seconds=2)
    retry: timedelta = timedelta(milliseconds=200)


class Announcer:
    """Announces sessions of one worker.

    After a broken stream its owner is asked first: it may only have lost the connection, and takes up where it was. After
    silence, and after each failure, it is the next replica's turn. A worker that differs from its peers is refused, and asks
    on.
    """

    def __init__(
        self, *, schedulers: Sequence[SchedulerTarget], address: str, worker_id: str, times: AnnounceTimes
    ) -> None:
        if not schedulers:
            raise ValueError("a worker needs at least one scheduler")
        self._schedulers = tuple(schedulers)
        self._turn = 0
        self._address = address
        self._worker_id = worker_id
        self._times = times
        self._refusal = ""
        """Why the last announcement was refused for the time being."""

    async def run(self, session: WorkerSession) -> None:
        """Until cancelled. Raises SessionOverError when a scheduler refuses the session for good."""
        while True:
            await session.disconnected.wait()
            if session.was_silent:
                session.was_silent = False
                self._turn += 1
            if not await self._announce_to(self._schedulers[self._turn % len(self._schedulers)], session):
                self._turn += 1
                await asyncio.sleep(self._times.retry.total_seconds())

    async def _announce_to(self, scheduler: SchedulerTarget, session: WorkerSession) -> bool:
        """Whether the replica opened a stream."""
        request = scheduler_pb2.AnnounceWorkerRequest(
            address=self._address,
            session_id=session.session_id,
            worker_id=self._worker_id,
            capabilities=encode_capabilities(session.capabilities),
        )
        try:
            async with asyncio.timeout(self._times.answer.total_seconds()):
                await scheduler.announce(request)
            async with asyncio.timeout(self._times.stream.total_seconds()):
                await session.connected.wait()
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.ABORTED:
                raise SessionOverError(error.details() or error.code().name) from error
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                self._note_refusal(scheduler.address, error.details() or error.code().name)
                return False
            _log.warning("announcement_failed", scheduler=scheduler.address, code=error.code().name)
            return False
        except TimeoutError:
            _log.warning("announcement_unanswered", scheduler=scheduler.address)
            return False
        self._refusal = ""
        return True

    def _note_refusal(self, scheduler: str, reason: str) -> None:
        """Other workers of the model are set up otherwise. When they are gone, this one is taken: it asks on, and says once
        what it waits for."""
        if reason != self._refusal:
            _log.error("announcement_refused", scheduler=scheduler, reason=reason)
        self._refusal = reason
