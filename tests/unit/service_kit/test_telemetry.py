import json
import os
from pathlib import Path

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from service_kit.telemetry import JsonLinesSpanExporter, context_from_traceparent, current_traceparent

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def make_tracer(directory: Path, max_file_bytes: int = 1 << 20) -> trace.Tracer:
    provider = TracerProvider()
    exporter = JsonLinesSpanExporter(directory, "gateway", max_file_bytes=max_file_bytes)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider.get_tracer("test")


def test_a_finished_span_is_one_json_line_with_all_its_fields(tmp_path: Path) -> None:
    tracer = make_tracer(tmp_path / "traces")
    span = tracer.start_span("work", context=context_from_traceparent(TRACEPARENT), start_time=1000)
    span.set_attribute("num_tokens", 3)
    span.add_event("first_token", {"position": 1}, timestamp=1500)
    span.end(end_time=2000)
    (line,) = (tmp_path / "traces" / f"gateway-{os.getpid()}.jsonl").read_text().splitlines()
    fields = json.loads(line)
    span_id = fields.pop("span_id")
    assert len(span_id) == 16
    assert fields == {
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "parent_id": "b7ad6b7169203331",
        "service": "gateway",
        "name": "work",
        "start_unix_ns": 1000,
        "end_unix_ns": 2000,
        "attributes": {"num_tokens": 3},
        "events": [{"name": "first_token", "unix_ns": 1500, "attributes": {"position": 1}}],
        "status": "UNSET",
    }


def test_a_full_file_is_kept_once_and_then_replaced(tmp_path: Path) -> None:
    tracer = make_tracer(tmp_path, max_file_bytes=500)
    for _ in range(20):
        tracer.start_span("work").end()
    assert len(list(tmp_path.iterdir())) <= 2
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2000


def test_a_traceparent_survives_the_way_through_a_context() -> None:
    assert current_traceparent(context_from_traceparent(TRACEPARENT)) == TRACEPARENT


def test_a_malformed_traceparent_gives_the_empty_context() -> None:
    for value in ("", "nonsense", "00-00000000000000000000000000000000-0000000000000000-01"):
        assert current_traceparent(context_from_traceparent(value)) == ""
    assert current_traceparent(Context()) == ""
