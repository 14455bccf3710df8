"""The gRPC server every service runs: health, reflection, limits, drain; and the interceptor all handlers stand behind."""

import asyncio
import contextlib
import inspect
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from opentelemetry import context as otel_context

from service_kit.errors import InternalError, InvalidArgumentError, SluiceError, UnavailableError
from service_kit.gate import Authorize, Gate
from service_kit.logging import get_logger
from service_kit.metrics import count_call_without_message, count_error
from service_kit.rpc_status import parse_rpc_error, to_error, to_grpc_status
from service_kit.telemetry import context_from_traceparent
from service_kit.tls import ServerTls

OVERALL = ""
"""Name under which the health service answers for the whole process."""

_log = get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Bounds of one server.

    max_request_bytes: a larger message is refused by gRPC itself, without a typed error, so services set it above what
    they want to refuse with one. max_pending_requests: calls accepted and not yet taken up; 10,000 streams opened at once
    fail with gRPC's own default.
    """

    max_request_bytes: int = 11 << 20
    max_response_bytes: int = 64 << 20
    max_pending_requests: int = 20_000

    def options(self) -> list[tuple[str, int]]:
        return [
            ("grpc.max_receive_message_length", self.max_request_bytes),
            ("grpc.max_send_message_length", self.max_response_bytes),
            ("grpc.server.max_pending_requests", self.max_pending_requests),
            ("grpc.server.max_pending_requests_hard_limit", 2 * self.max_pending_requests),
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.keepalive_timeout_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
            ("grpc.http2.max_ping_strikes", 0),
            # A second process on the same port must fail to start, not take half of the connections.
            ("grpc.so_reuseport", 0),
        ]


class GrpcServer:
    """One aio server. All its services start as NOT_SERVING; `set_serving` is the owner's word. Not restartable."""

    def __init__(
        self,
        *,
        listen: str,
        services: Mapping[str, Callable[[grpc.aio.Server], None]],
        limits: ServerLimits | None = None,
        authorize: Authorize | None = None,
        tls: ServerTls | None = None,
    ) -> None:
        """`services`: what registers a servicer, by the service's full name. `listen`: "host:port" or "unix:path".

        `authorize` is asked before every call of every service, reflection included, health excluded. `tls` None: plain.
        """
        self._listen = listen
        self._tls = tls
        self._service_names = tuple(services)
        self._gate = Gate(authorize)
        self._server = grpc.aio.server(
            interceptors=[HandlerInterceptor(self._gate)], options=(limits or ServerLimits()).options()
        )
        for register in services.values():
            register(self._server)
        # The stubs of grpc_health do not show the aio half.
        self._health: Any = cast("Any", health).aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (*self._service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        self._is_stopped = False

    @property
    def num_refused(self) -> int:
        """Calls that were not authorized."""
        return self._gate.num_refused

    async def start(self) -> int:
        """Listens; returns the port. Raises RuntimeError when the address cannot be bound, OSError for bad TLS files."""
        await self.set_serving(is_serving=False)
        if self._tls is None:
            port = self._server.add_insecure_port(self._listen)
        else:
            port = self._server.add_secure_port(self._listen, self._tls.credentials())
        await self._server.start()
        return port

    async def set_serving(self, *, is_serving: bool) -> None:
        """What health says of every service and of the process."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        value = status.SERVING if is_serving else status.NOT_SERVING
        for name in (OVERALL, *self._service_names):
            await self._health.set(name, value)

    async def stop(self, grace: timedelta) -> None:
        """Not serving any more, no new calls, `grace` for the running ones, then they are cut. Idempotent."""
        if self._is_stopped:
            return
        self._is_stopped = True
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace.total_seconds())


class HandlerInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Asks the gate, runs every handler in the caller's trace context, and turns what it raises into a rich status.

    A SluiceError becomes its status; anything else is logged and becomes INTERNAL with a request id. A CancelledError
    that did not come from cancelling this call (an awaited task was cancelled) would send the client nothing: it becomes
    UNAVAILABLE.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any]"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        method: str = handler_call_details.method
        refusal = self._gate.find_refusal(handler_call_details)
        if refusal is not None:
            return _refuse_all(refusal, method)
        handler: Any = await continuation(handler_call_details)
        if handler is None:  # an unknown method: gRPC answers UNIMPLEMENTED
            return cast("grpc.RpcMethodHandler[Any, Any]", handler)
        if handler.request_streaming and handler.response_streaming:
            wrap, behaviour = grpc.stream_stream_rpc_method_handler, _stream(handler.stream_stream, method)
        elif handler.request_streaming:
            wrap, behaviour = grpc.stream_unary_rpc_method_handler, _unary(handler.stream_unary, method)
        elif handler.response_streaming:
            wrap, behaviour = grpc.unary_stream_rpc_method_handler, _stream(handler.unary_stream, method)
        else:
            wrap, behaviour = grpc.unary_unary_rpc_method_handler, _unary(handler.unary_unary, method)
        parse = handler.request_deserializer
        wrapped: grpc.RpcMethodHandler[Any, Any] = wrap(
            behaviour,
            request_deserializer=parse if parse is None or handler.request_streaming else _Parser(parse),
            response_serializer=handler.response_serializer,
        )
        return wrapped


def _refuse_all(refusal: SluiceError, method: str) -> "grpc.RpcMethodHandler[Any, Any]":
    """A handler for any kind of method, known or not: it reads nothing and answers with the status."""

    async def refuse(requests: Any, context: Any) -> None:
        del requests
        await _fail(refusal, context, method)

    return grpc.stream_stream_rpc_method_handler(cast("Any", refuse))


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands for a request that could not be parsed, until its handler would run."""


class _Parser:
    """One call's request deserializer, whose failure becomes INVALID_ARGUMENT; gRPC itself would make it a bare INTERNAL.

    What goes unused is counted: gRPC answers a message that is too large by itself, and then no handler runs.
    """

    def __init__(self, parse: Callable[[bytes], Any]) -> None:
        self._parse = parse
        self._is_used = False

    def __del__(self) -> None:
        if not self._is_used:
            count_call_without_message()

    def __call__(self, data: bytes) -> Any:
        self._is_used = True
        try:
            return self._parse(data)
        except Exception:  # noqa: BLE001 - whatever the parser raises is about the caller's bytes
            return _Malformed()


def _check_parsed(request: Any) -> None:
    if isinstance(request, _Malformed):
        raise InvalidArgumentError("", "the request is not a message of this method")


def _unary(behaviour: Any, method: str) -> Any:
    async def run(request: Any, context: Any) -> Any:
        _enter_trace(context)
        try:
            _check_parsed(request)
            return await behaviour(request, context)
        except BaseException as error:  # noqa: BLE001 - classified, never swallowed
            await _fail(error, context, method)

    return run


def _stream(behaviour: Any, method: str) -> Any:
    """The reader/writer form of a handler, so that the inner generator is closed before the status is sent."""

    async def run(request: Any, context: Any) -> None:
        _enter_trace(context)
        try:
            _check_parsed(request)
            responses = behaviour(request, context)
            if inspect.isawaitable(responses):
                await responses
                return
            async with _closing(responses):
                async for response in responses:
                    await context.write(response)
        except BaseException as error:  # noqa: BLE001 - classified, never swallowed
            await _fail(error, context, method)

    return run


@contextlib.asynccontextmanager
async def _closing(responses: Any) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await responses.aclose()


def _enter_trace(context: Any) -> None:
    """Makes the caller's span current. Each call runs in its own task, so there is nothing to restore."""
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent":
            otel_context.attach(context_from_traceparent(value))
            return


async def _fail(error: BaseException, context: Any, method: str) -> NoReturn:
    request_id = uuid.uuid4().hex
    known = _classify(error)
    if known is None:
        raise error
    if isinstance(known, InternalError):
        _log.error("rpc_failed", method=method, request_id=request_id, reason=known.reason, exc_info=error)
    elif isinstance(error, asyncio.CancelledError):
        _log.warning("rpc_handler_cancelled_inside", method=method, request_id=request_id)
    count_error(known.reason)
    status = to_grpc_status(known, request_id=request_id)
    # What the handler has set travels with the status, which else would take its place.
    told = (*(context.trailing_metadata() or ()), *status.trailing_metadata)
    await context.abort(status.code, status.details, told)
    raise AssertionError("abort raises")


def _classify(error: BaseException) -> SluiceError | None:
    """The error to tell the caller, or None when this one must go on as it is."""
    known: SluiceError | None = None
    match error:
        case SluiceError():
            known = error
        case asyncio.CancelledError():
            task = asyncio.current_task()
            if task is None or task.cancelling() == 0:
                known = UnavailableError("the call was interrupted inside the service")
        case grpc.aio.AioRpcError():
            known = to_error(parse_rpc_error(error))
        case BaseExceptionGroup() if len(error.exceptions) == 1:
            # A TaskGroup wraps what its children raise; one cause is the cause.
            known = _classify(error.exceptions[0])
        case grpc.aio.AbortError():
            pass
        case Exception():
            known = InternalError(str(error))
    return known
