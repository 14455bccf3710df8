"""Traces: the OpenTelemetry SDK, an exporter that writes JSON lines, and helpers for spans across processes.

Attributes are ids, counts and reasons; never prompt or output text, never keys.
"""

import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

AttributeValue = str | bool | int | float

_MAX_QUEUED_SPANS = 16_384
_EXPORT_DELAY_MS = 500
_MAX_FILE_BYTES = 64 << 20
_PROPAGATOR = TraceContextTextMapPropagator()


class JsonLinesSpanExporter(SpanExporter):
    """Writes finished spans to `<directory>/<service>-<pid>.jsonl`, one JSON object per line.

    At `max_file_bytes` the file becomes `<service>-<pid>.old.jsonl` and replaces the one before: disk use is bounded.
    """

    def __init__(self, directory: Path, service_name: str, *, max_file_bytes: int = _MAX_FILE_BYTES) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._service_name = service_name
        self._path = directory / f"{service_name}-{os.getpid()}.jsonl"
        self._max_file_bytes = max_file_bytes
        self._lock = threading.Lock()
        self._file = self._path.open("a", encoding="utf-8")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = "".join(json.dumps(span_fields(span, self._service_name)) + "\n" for span in spans)
        with self._lock:
            if self._file.closed:
                return SpanExportResult.FAILURE
            self._file.write(lines)
            self._file.flush()
            if self._file.tell() >= self._max_file_bytes:
                self._rotate()
        return SpanExportResult.SUCCESS

    def _rotate(self) -> None:
        self._file.close()
        self._path.replace(self._path.with_suffix(".old.jsonl"))
        self._file = self._path.open("a", encoding="utf-8")

    def shutdown(self) -> None:
        with self._lock:
            self._file.close()


def span_fields(span: ReadableSpan, service_name: str) -> dict[str, object]:
    """One finished span as JSON-able fields. Ids are lower-case hex as in traceparent; times are Unix nanoseconds."""
    context = span.get_span_context()
    assert context is not None
    return {
        "trace_id": trace.format_trace_id(context.trace_id),
        "span_id": trace.format_span_id(context.span_id),
        "parent_id": trace.format_span_id(span.parent.span_id) if span.parent else None,
        "service": service_name,
        "name": span.name,
        "start_unix_ns": span.start_time,
        "end_unix_ns": span.end_time,
        "attributes": dict(span.attributes or {}),
        "events": [
            {"name": event.name, "unix_ns": event.timestamp, "attributes": dict(event.attributes or {})}
            for event in span.events
        ],
        "status": span.status.status_code.name,
    }


class Tracing:
    """Owner of the process's tracer provider. `shutdown` flushes what has ended; calling it again does nothing."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._is_shut_down = False

    def shutdown(self) -> None:
        if not self._is_shut_down:
            self._is_shut_down = True
            self._provider.shutdown()


def setup_tracing(*, service_name: str, trace_dir: Path | None, otlp_endpoint: str | None = None) -> Tracing:
    """Makes the process's tracer provider; once per process, from its composition root.

    `trace_dir` gets JSON lines; `otlp_endpoint` gets OTLP over gRPC, when the exporter package is installed. With neither,
    spans are made (their ids travel) and dropped.
    """
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: service_name}))
    exporters: list[SpanExporter] = []
    if trace_dir is not None:
        exporters.append(JsonLinesSpanExporter(trace_dir, service_name))
    if otlp_endpoint:
        exporters.append(_otlp_exporter(otlp_endpoint))
    for exporter in exporters:
        provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=_MAX_QUEUED_SPANS, schedule_delay_millis=_EXPORT_DELAY_MS)
        )
    trace.set_tracer_provider(provider)
    return Tracing(provider)


class OtlpExporterMissingError(Exception):
    """An OTLP endpoint is configured and the exporter is not installed."""


def _otlp_exporter(endpoint: str) -> SpanExporter:
    try:
        # An optional extra: a process without an OTLP endpoint must start without it.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    except ImportError as error:
        raise OtlpExporterMissingError("OTEL_EXPORTER_OTLP_ENDPOINT is set: install the extra sluice[otlp]") from error
    exporter: SpanExporter = OTLPSpanExporter(endpoint=endpoint)
    return exporter


def tracer() -> trace.Tracer:
    return trace.get_tracer("sluice")


def current_traceparent(context: Context | None = None) -> str:
    """W3C traceparent of the current span (or of `context`); empty when there is none."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=context)
    return carrier.get("traceparent", "")


def context_from_traceparent(traceparent: str) -> Context:
    """The context whose current span is the remote one; the empty context for an empty or malformed value."""
    return _PROPAGATOR.extract({"traceparent": traceparent}, context=Context())


def record_span(
    name: str,
    *,
    start_unix_ns: int,
    end_unix_ns: int,
    parent: Context | str | None = None,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> str:
    """Records a span whose times are known; `parent` is a context or a traceparent. Returns its own traceparent."""
    context = context_from_traceparent(parent) if isinstance(parent, str) else parent
    span = tracer().start_span(name, context=context, start_time=start_unix_ns, attributes=attributes)
    span.end(end_time=end_unix_ns)
    return current_traceparent(trace.set_span_in_context(span, Context()))
