import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from opentelemetry import trace

from service_kit.errors import InvalidArgumentError, NotFoundError
from service_kit.grpc_client import INTERNAL_TOKEN_KEY, open_channel
from service_kit.grpc_server import GrpcServer, ServerLimits
from service_kit.rpc_status import parse_rpc_error
from service_kit.telemetry import context_from_traceparent, current_traceparent

SERVICE = "test.Echo"
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Echo:
    """Handlers over raw bytes that each misbehave in one way."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.seen_cancelled: bool | None = None

    async def unary(self, request: bytes, context: Any) -> bytes:
        match request:
            case b"domain":
                raise InvalidArgumentError("a.b", "is bad")
            case b"bug":
                raise RuntimeError("secret text")
            case b"inner-cancel":
                inner = asyncio.get_running_loop().create_future()
                inner.cancel()
                await inner
            case b"abort":
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "as it is")
            case b"group":
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._fail())
            case b"trace":
                return current_traceparent().encode()
            case b"token":
                return dict(context.invocation_metadata())[INTERNAL_TOKEN_KEY].encode()
            case b"wait":
                await asyncio.Event().wait()
        return request

    async def _fail(self) -> None:
        raise NotFoundError("not there")

    async def stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            yield b"one"
            if request == b"domain":
                raise NotFoundError("gone")
            if request == b"wait":
                await asyncio.Event().wait()
            yield b"two"
        except (asyncio.CancelledError, GeneratorExit):  # the latter when it was not resumed after its last message
            self.seen_cancelled = context.cancelled()
            raise
        finally:
            self.closed.set()

    async def duplex(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request.upper()
        raise NotFoundError("end")


def register(echo: Echo) -> Callable[[grpc.aio.Server], None]:
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(echo.unary),
        "Stream": grpc.unary_stream_rpc_method_handler(echo.stream),
        "Duplex": grpc.stream_stream_rpc_method_handler(echo.duplex),
    }
    return lambda server: server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])


@pytest.fixture
async def echo() -> Echo:
    return Echo()


@pytest.fixture
async def channel(echo: Echo) -> AsyncIterator[grpc.aio.Channel]:
    server = GrpcServer(
        listen="127.0.0.1:0", services={SERVICE: register(echo)}, limits=ServerLimits(max_request_bytes=1024)
    )
    port = await server.start()
    await server.set_serving(is_serving=True)
    channel = open_channel(f"127.0.0.1:{port}", internal_token="s3cret")
    yield channel
    await channel.close(None)
    await server.stop(timedelta(0))


async def call(channel: grpc.aio.Channel, request: bytes) -> bytes:
    response: bytes = await channel.unary_unary(f"/{SERVICE}/Unary", None, None)(request, timeout=10)
    return response


async def test_a_domain_error_arrives_as_a_rich_status(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, b"domain")
    failure = parse_rpc_error(caught.value)
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert [violation.field for violation in failure.violations] == ["a.b"]


async def test_a_bug_is_internal_with_a_request_id_and_without_its_text(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, b"bug")
    failure = parse_rpc_error(caught.value)
    assert failure.code is grpc.StatusCode.INTERNAL
    assert failure.reason == "INTERNAL"
    assert failure.request_id
    assert "secret" not in failure.message


async def test_a_cancellation_inside_the_service_is_unavailable_and_not_silence(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, b"inner-cancel")
    failure = parse_rpc_error(caught.value)
    assert failure.code is grpc.StatusCode.UNAVAILABLE
    assert failure.retry_after == timedelta(seconds=1)


async def test_a_handlers_own_abort_passes_unchanged(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, b"abort")
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.FAILED_PRECONDITION, "as it is")


async def test_the_one_error_in_a_task_group_is_the_error(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, b"group")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_stream_delivers_what_came_before_its_error(channel: grpc.aio.Channel, echo: Echo) -> None:
    responses = channel.unary_stream(f"/{SERVICE}/Stream", None, None)(b"domain", timeout=10)
    assert await responses.read() == b"one"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await responses.read()
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert echo.closed.is_set()


async def test_a_client_that_leaves_closes_the_handlers_generator(channel: grpc.aio.Channel, echo: Echo) -> None:
    responses = channel.unary_stream(f"/{SERVICE}/Stream", None, None)(b"wait", timeout=10)
    assert await anext(aiter(responses)) == b"one"
    responses.cancel()
    async with asyncio.timeout(10):
        await echo.closed.wait()
    assert echo.seen_cancelled is not None


async def test_both_directions_can_stream(channel: grpc.aio.Channel) -> None:
    responses = channel.stream_stream(f"/{SERVICE}/Duplex", None, None)(timeout=10)  # type: ignore[call-arg]
    await responses.write(b"a")
    assert await responses.read() == b"A"
    await responses.done_writing()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await responses.read()
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_the_callers_trace_context_and_token_reach_the_handler(channel: grpc.aio.Channel) -> None:
    with trace.use_span(trace.get_current_span(context_from_traceparent(TRACEPARENT))):
        assert await call(channel, b"trace") == TRACEPARENT.encode()
    assert await call(channel, b"token") == b"s3cret"


async def test_without_a_callers_trace_there_is_none(channel: grpc.aio.Channel) -> None:
    assert await call(channel, b"trace") == b""


async def test_an_unknown_method_is_unimplemented(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(f"/{SERVICE}/Nothing", None, None)(b"x", timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_health_follows_the_owners_word_for_the_process_and_each_service(echo: Echo) -> None:
    server = GrpcServer(listen="127.0.0.1:0", services={SERVICE: register(echo)})
    port = await server.start()
    channel = open_channel(f"127.0.0.1:{port}")
    stub: Any = health_pb2_grpc.HealthStub(channel)
    status = health_pb2.HealthCheckResponse.ServingStatus
    for is_serving, expected in ((None, status.NOT_SERVING), (True, status.SERVING), (False, status.NOT_SERVING)):
        if is_serving is not None:
            await server.set_serving(is_serving=is_serving)
        for name in ("", SERVICE):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
            assert answer.status == expected
    await channel.close(None)
    await server.stop(timedelta(0))
    await server.stop(timedelta(0))


async def test_reflection_lists_the_services(channel: grpc.aio.Channel) -> None:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(timeout=10)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await call.read()
    await call.done_writing()
    assert SERVICE in {service.name for service in answer.list_services_response.service}


async def test_stopping_lets_a_running_call_end_within_the_grace_and_cuts_it_after(echo: Echo) -> None:
    server = GrpcServer(listen="127.0.0.1:0", services={SERVICE: register(echo)})
    channel = open_channel(f"127.0.0.1:{await server.start()}")
    responses = channel.unary_stream(f"/{SERVICE}/Stream", None, None)(b"wait", timeout=10)
    assert await anext(aiter(responses)) == b"one"
    await server.stop(timedelta(milliseconds=50))
    with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
        await responses.read()
    assert echo.closed.is_set()
    await channel.close(None)


async def test_a_port_in_use_fails_the_start(echo: Echo) -> None:
    first = GrpcServer(listen="127.0.0.1:0", services={SERVICE: register(echo)})
    port = await first.start()
    second = GrpcServer(listen=f"127.0.0.1:{port}", services={SERVICE: register(echo)})
    with pytest.raises(RuntimeError):
        await second.start()
    await first.stop(timedelta(0))
    await second.stop(timedelta(0))
