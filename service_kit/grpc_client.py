"""Client channels between services: keepalive, quick reconnection, trace context and the internal token."""

from collections.abc import Awaitable, Callable
from typing import Any, cast

import grpc

from service_kit.telemetry import current_traceparent
from service_kit.tls import ClientTls

MAX_INTERNAL_MESSAGE_BYTES = 64 << 20
INTERNAL_TOKEN_KEY = "x-sluice-internal-token"  # noqa: S105 - the name of the entry, not its value
_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A replaced container has the old name and a new address; the default would try the old one for 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    ("grpc.max_send_message_length", MAX_INTERNAL_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_INTERNAL_MESSAGE_BYTES),
    # Channels to one address made at different times stay independent: a restarted peer is seen by each for itself.
    ("grpc.use_local_subchannel_pool", 1),
)

Metadata = tuple[tuple[str, str], ...]


def outgoing_metadata(internal_token: str | None = None) -> Metadata:
    """Trace context of the current span and the internal token, for one call.

    Channels from `open_channel` add them to unary-unary and unary-stream calls by themselves; calls with a request stream
    pass this, because an intercepted request stream costs a queue per message.
    """
    entries: list[tuple[str, str]] = []
    if traceparent := current_traceparent():
        entries.append(("traceparent", traceparent))
    if internal_token:
        entries.append((INTERNAL_TOKEN_KEY, internal_token))
    return tuple(entries)


class _MetadataInterceptor:
    def __init__(self, internal_token: str | None) -> None:
        self._internal_token = internal_token

    def _extend(self, details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        metadata = grpc.aio.Metadata(*(details.metadata or ()))
        for key, value in outgoing_metadata(self._internal_token):
            if key not in metadata:
                metadata.add(key, value)
        # The stubs give the class only its constructor; it is a named tuple.
        extended = cast("Any", details)._replace(metadata=metadata)
        return cast("grpc.aio.ClientCallDetails", extended)


class _UnaryUnaryMetadata(_MetadataInterceptor, grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    async def intercept_unary_unary(
        self,
        continuation: Callable[[grpc.aio.ClientCallDetails, Any], Awaitable[Any]],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        return await continuation(self._extend(client_call_details), request)


class _UnaryStreamMetadata(_MetadataInterceptor, grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    async def intercept_unary_stream(
        self,
        continuation: Callable[[grpc.aio.ClientCallDetails, Any], Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        return await continuation(self._extend(client_call_details), request)


def open_channel(target: str, *, internal_token: str | None = None, tls: ClientTls | None = None) -> grpc.aio.Channel:
    """A channel to `target` ("host:port" or "unix:path"), plain without `tls`. It connects lazily; the caller closes it.

    Raises OSError when the files of `tls` cannot be read.
    """
    interceptors: list[Any] = [_UnaryUnaryMetadata(internal_token), _UnaryStreamMetadata(internal_token)]
    if tls is None:
        return grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS, interceptors=interceptors)
    options = (*_CHANNEL_OPTIONS, *tls.options())
    return grpc.aio.secure_channel(target, tls.credentials(), options=options, interceptors=interceptors)
