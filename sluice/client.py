"""The Python client: its streams reconnect and continue at the next token by themselves."""

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self, TypeVar

import grpc

from inference.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from service_kit.delta import Cursor
from service_kit.errors import Reason
from service_kit.grpc_client import open_channel
from service_kit.rpc_status import RpcFailure, parse_rpc_error, to_error
from service_kit.tls import ClientTls
from sluice.client_codec import (
    StreamResponse,
    accepted_from_proto,
    cursor_to_proto,
    delivery_to_proto,
    events_from_delta,
    spec_to_proto,
    state_name,
)
from sluice.client_events import Accepted, Event, Finished, GaveUpError, Input, Output, Reconnecting, Sampling
from sluice.retry import RetryPolicy, is_worth_retrying

AnswerT = TypeVar("AnswerT")

_DEFAULT_SAMPLING = Sampling()
_UNARY_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """Where and how. `targets` ("host:port") are gateways of one service; after a failure the next one is tried. Without
    `tls` nothing is encrypted."""

    targets: tuple[str, ...]
    api_key: str
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    tls: ClientTls | None = None


class SluiceClient:
    """Asynchronous client; close it, or use it as a context manager.

    Every failure is a `service_kit.errors.SluiceError` with `reason` (and `violations`, `retry_after` where they apply).
    Retried are UNAVAILABLE and broken connections, which is safe: a call carries its request_id, so repeating it attaches.
    """

    def __init__(
        self,
        settings: ClientSettings,
        *,
        connect: Callable[[str], grpc.aio.Channel] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`connect` opens a channel, where that of the settings will not do. Opens nothing before the first call."""
        if not settings.targets:
            raise ValueError("targets: at least one host:port")
        self._settings = settings
        self._connect = connect or (lambda target: open_channel(target, tls=settings.tls))
        self._sleep = sleep
        self._clock = clock
        self._draw = draw
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._target = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; running streams end. Idempotent."""
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close(None)

    async def generate(
        self,
        model: str,
        source: Input,
        *,
        sampling: Sampling = _DEFAULT_SAMPLING,
        request_id: str | None = None,
        cursor: Cursor | None = None,
        priority_class: str = "standard",
        grace: timedelta | None = None,
        queue_timeout: timedelta | None = None,
        deadline: timedelta | None = None,
        store: bool | None = None,
    ) -> AsyncGenerator[Event, None]:
        """Accepted, then Output events, then Finished; Reconnecting in between when the connection breaks.

        `request_id` is the idempotency key (drawn when None): the same one attaches to the same generation, from `cursor`.
        Leaving the iterator starts the generation's grace period; it does not cancel at once. With `store` False the service
        deletes prompt and output soon after the end. Raises SluiceError.
        """
        identity = request_id or str(uuid.uuid4())
        spec = spec_to_proto(model, source, sampling, priority_class)
        delivery = delivery_to_proto(grace, queue_timeout, deadline, store=store)

        def call(stub: "inference_pb2_grpc.InferenceServiceAsyncStub", at: Cursor) -> Any:
            request = inference_pb2.GenerateRequest(
                request_id=identity, spec=spec, cursor=cursor_to_proto(at), delivery=delivery
            )
            return stub.Generate(request, metadata=self._metadata())

        async with contextlib.aclosing(self._stream(call, cursor or Cursor(), identity)) as events:
            async for event in events:
                yield event

    async def stream(
        self, *, generation_id: str = "", request_id: str = "", cursor: Cursor | None = None
    ) -> AsyncGenerator[Event, None]:
        """As `generate`, for a generation that exists; named by either id. Raises SluiceError."""
        generation = _reference(generation_id, request_id)

        def call(stub: "inference_pb2_grpc.InferenceServiceAsyncStub", at: Cursor) -> Any:
            request = inference_pb2.StreamGenerationRequest(generation=generation, cursor=cursor_to_proto(at))
            return stub.StreamGeneration(request, metadata=self._metadata())

        async with contextlib.aclosing(self._stream(call, cursor or Cursor(), request_id or generation_id)) as events:
            async for event in events:
                yield event

    async def create(
        self,
        model: str,
        source: Input,
        *,
        sampling: Sampling = _DEFAULT_SAMPLING,
        request_id: str | None = None,
        priority_class: str = "standard",
        grace: timedelta | None = None,
        store: bool | None = None,
    ) -> Accepted:
        """Commit a generation that nobody needs to watch; read it later with `stream` or `get`. Raises SluiceError."""
        request = inference_pb2.CreateGenerationRequest(
            request_id=request_id or str(uuid.uuid4()),
            spec=spec_to_proto(model, source, sampling, priority_class),
            delivery=delivery_to_proto(grace, None, None, store=store),
        )
        answer = await self._unary(lambda stub, **options: stub.CreateGeneration(request, **options))
        return accepted_from_proto(answer.accepted)

    async def get(self, *, generation_id: str = "", request_id: str = "") -> types_pb2.Generation:
        """The record with the output so far. Raises SluiceError."""
        request = inference_pb2.GetGenerationRequest(generation=_reference(generation_id, request_id))
        answer = await self._unary(lambda stub, **options: stub.GetGeneration(request, **options))
        generation: types_pb2.Generation = answer.generation
        return generation

    async def cancel(self, *, generation_id: str = "", request_id: str = "") -> str:
        """Ask for the end; idempotent. Returns the state after the request was recorded. Raises SluiceError."""
        request = inference_pb2.CancelGenerationRequest(generation=_reference(generation_id, request_id))
        answer = await self._unary(lambda stub, **options: stub.CancelGeneration(request, **options))
        return state_name(answer.state)

    async def list_models(self) -> list[types_pb2.Model]:
        request = inference_pb2.ListModelsRequest()
        answer = await self._unary(lambda stub, **options: stub.ListModels(request, **options))
        return list(answer.models)

    async def _stream(
        self,
        call: Callable[["inference_pb2_grpc.InferenceServiceAsyncStub", Cursor], Any],
        cursor: Cursor,
        request_id: str,
    ) -> AsyncGenerator[Event, None]:
        recovery = _Recovery(self._settings.retry, self._clock, self._draw)
        is_accepted = False
        while True:
            failure = RpcFailure(code=grpc.StatusCode.UNAVAILABLE, message="the stream ended before the output did")
            try:
                async with contextlib.aclosing(_responses(call(self._stub(), cursor))) as responses:
                    async for response in responses:
                        if response.HasField("accepted"):
                            recovery.connected()
                            if not is_accepted:
                                is_accepted = True
                                yield accepted_from_proto(response.accepted)
                            continue
                        recovery.progress()
                        for event in events_from_delta(response.delta, cursor):
                            if isinstance(event, Output):
                                cursor = event.cursor
                            yield event
                            if isinstance(event, Finished):
                                return
            except grpc.aio.AioRpcError as error:
                failure = parse_rpc_error(error)
            pause = recovery.pause(failure, request_id, cursor)
            yield pause
            await self._try_next(pause.delay_s)

    async def _unary(self, call: Callable[..., Awaitable[AnswerT]]) -> AnswerT:
        recovery = _Recovery(self._settings.retry, self._clock, self._draw)
        while True:
            try:
                return await call(self._stub(), metadata=self._metadata(), timeout=_UNARY_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                failure = parse_rpc_error(error)
            pause = recovery.pause(failure, "", Cursor())
            await self._try_next(pause.delay_s)

    async def _try_next(self, delay_s: float) -> None:
        """Wait, then use the next gateway."""
        self._target = (self._target + 1) % len(self._settings.targets)
        await self._sleep(delay_s)

    def _stub(self) -> "inference_pb2_grpc.InferenceServiceAsyncStub":
        target = self._settings.targets[self._target]
        if target not in self._channels:
            self._channels[target] = self._connect(target)
        return inference_pb2_grpc.InferenceServiceStub(self._channels[target])

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self._settings.api_key}"),)


class _Recovery:
    """Failures in a row, and the decision to go on or to give up.

    What counts against the limit is the time without a stream since the last output: waiting in the queue is no failure,
    and a service that accepts and breaks again and again is not progress.
    """

    def __init__(self, policy: RetryPolicy, clock: Callable[[], float], draw: Callable[[], float]) -> None:
        self._policy = policy
        self._clock = clock
        self._draw = draw
        self._failures = 0
        self._down_s = 0.0
        self._down_since_s: float | None = None

    def connected(self) -> None:
        if self._down_since_s is not None:
            self._down_s += self._clock() - self._down_since_s
            self._down_since_s = None

    def progress(self) -> None:
        self._failures = 0
        self._down_s = 0.0
        self._down_since_s = None

    def pause(self, failure: RpcFailure, request_id: str, cursor: Cursor) -> Reconnecting:
        """What to do about `failure`. Raises the typed error when retrying is pointless, GaveUpError when it takes too long."""
        if not is_worth_retrying(failure):
            raise to_error(failure)
        now_s = self._clock()
        if self._down_since_s is None:
            self._down_since_s = now_s
        self._failures += 1
        delay_s = self._policy.delay_s(self._failures, failure.retry_after, self._draw())
        give_up_s = self._policy.give_up_after.total_seconds()
        if self._down_s + (now_s - self._down_since_s) + delay_s > give_up_s:
            raise GaveUpError(
                f"gave up after {give_up_s:g} s without the service: {failure.message}",
                reason=failure.reason or Reason.UNAVAILABLE,
                request_id=request_id,
                cursor=cursor,
            )
        return Reconnecting(failures=self._failures, delay_s=delay_s, cause=failure.reason or failure.code.name)


async def _responses(call: Any) -> AsyncGenerator[StreamResponse, None]:
    """The messages of one call; leaving early cancels it, so that the server notices at once."""
    try:
        async for response in call:
            yield response
    finally:
        call.cancel()


def _reference(generation_id: str, request_id: str) -> inference_pb2.GenerationRef:
    if bool(generation_id) == bool(request_id):
        raise ValueError("name the generation by generation_id or by request_id")
    if generation_id:
        return inference_pb2.GenerationRef(generation_id=generation_id)
    return inference_pb2.GenerationRef(request_id=request_id)


def connect(
    targets: Sequence[str] | str, api_key: str, *, retry: RetryPolicy | None = None, tls: ClientTls | None = None
) -> SluiceClient:
    """A client for one gateway or several of one service; without `tls` nothing is encrypted."""
    addresses = (targets,) if isinstance(targets, str) else tuple(targets)
    return SluiceClient(ClientSettings(targets=addresses, api_key=api_key, retry=retry or RetryPolicy(), tls=tls))
