"""The servicer of `WorkerService`: decode, call the session, encode."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from datetime import timedelta
from typing import Any

from gpu_worker.codec import decode_assignment, decode_ref, decode_refs, decode_verdict, encode_outgoing
from gpu_worker.session import WorkerSession
from gpu_worker.session_stream import EngineLostMessage, SessionStream
from gpu_worker.supervisor import EngineLostError
from gpu_worker.tasks import run_until_first
from inference.internal.v1 import worker_pb2, worker_pb2_grpc
from service_kit.errors import AbortedError, InvalidArgumentError, UnavailableError
from service_kit.ids import SchedulerId, SessionId

_OPEN_TIMEOUT = timedelta(seconds=2)


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves the session that is current when a stream opens."""

    def __init__(self, *, current_session: Callable[[], WorkerSession | None]) -> None:
        self._current_session = current_session

    async def Session(self, request_iterator: AsyncIterator[worker_pb2.SessionRequest], context: Any) -> None:  # type: ignore[override]  # noqa: N802 - named by the proto
        """Raises SluiceErrors; returns when the stream ends in good order."""
        requests = aiter(request_iterator)
        opening = await _read_open(requests)
        session = self._current_session()
        if session is None:
            raise UnavailableError("the engine is not ready")
        stream = session.open_stream(
            session_id=SessionId(opening.session_id),
            owner_epoch=opening.owner_epoch,
            scheduler_id=SchedulerId(opening.scheduler_id),
        )
        try:
            # A closed stream says why, whatever else ended at the same moment.
            await run_until_first(
                stream.wait_closed(),
                _read(requests, session, stream),
                _write(context, session, stream),
                _watch_silence(stream),
            )
        finally:
            session.release_stream(stream)


async def _read_open(requests: AsyncIterator[worker_pb2.SessionRequest]) -> worker_pb2.Open:
    try:
        async with asyncio.timeout(_OPEN_TIMEOUT.total_seconds()):
            first = await anext(requests, None)
    except TimeoutError as error:
        raise UnavailableError("the stream was not opened in time") from error
    if first is None or first.WhichOneof("message") != "open":
        raise InvalidArgumentError("open", "must be the first message")
    return first.open


async def _read(
    requests: AsyncIterator[worker_pb2.SessionRequest], session: WorkerSession, stream: SessionStream
) -> None:
    """Until the scheduler closes its half, which is an error: only a drained worker ends a stream in good order."""
    async for request in requests:
        if stream.is_closed:
            break  # what a superseded owner says no longer counts
        stream.heard()
        try:
            await _apply(request, session, stream)
        except EngineLostError:
            await stream.wait_closed()  # the worker has lost it as well: it says what it knows, and ends the session
    raise UnavailableError("the scheduler closed its half of the stream")


async def _apply(request: worker_pb2.SessionRequest, session: WorkerSession, stream: SessionStream) -> None:
    match request.WhichOneof("message"):
        case "assign":
            await _assign(request.assign.assignments, session)
        case "cancel":
            await session.cancel(decode_refs(request.cancel.attempts))
        case "ack":
            stream.acknowledge(request.ack.batch)
        case "verdict":
            for ref, action, resend_from in [decode_verdict(each) for each in request.verdict.attempts]:
                await session.judge(ref, action, resend_from)
        case "end_ack":
            await session.acknowledge_ends(decode_refs(request.end_ack.attempts))
        case "drain":
            session.drain()
        case "open":
            raise InvalidArgumentError("open", "must be the first message only")
        case _:
            raise InvalidArgumentError("message", "is not set")


async def _assign(messages: Iterable[worker_pb2.Assignment], session: WorkerSession) -> None:
    """One bad assignment ends as a failure and does not keep the others from running."""
    assignments = []
    for message in messages:
        ref = decode_ref(worker_pb2.AttemptRef(generation_id=message.generation_id, attempt=message.attempt))
        try:
            assignments.append(decode_assignment(message, ref))
        except InvalidArgumentError as error:
            await session.refuse(ref, error.message, num_prior=len(message.output_token_ids))
    await session.assign(assignments)


async def _write(context: Any, session: WorkerSession, stream: SessionStream) -> None:
    while True:
        message = await stream.next_message()
        response = encode_outgoing(message, session_id=session.session_id, capabilities=session.capabilities)
        await context.write(response)
        if isinstance(message, EngineLostMessage):
            stream.close(AbortedError("the session ended with its engine"))
            await stream.wait_closed()


async def _watch_silence(stream: SessionStream) -> None:
    await stream.watch_silence()
    await stream.wait_closed()
