import json
from pathlib import Path

from sluice.timeline import Span, is_connected, parse_span, read_spans, render_timeline, services_of


def _span(span_id: str, parent_id: str | None, start_ms: float, end_ms: float, **changes: object) -> Span:
    fields = {
        "trace_id": "t1",
        "span_id": span_id,
        "parent_id": parent_id,
        "service": "gateway",
        "name": f"span-{span_id}",
        "start_ns": int(start_ms * 1e6),
        "end_ns": int(end_ms * 1e6),
        **changes,
    }
    return Span(**fields)  # type: ignore[arg-type]


def _line(**changes: object) -> str:
    fields = {
        "trace_id": "t1",
        "span_id": "a",
        "parent_id": None,
        "service": "scheduler",
        "name": "submit",
        "start_unix_ns": 5,
        "end_unix_ns": 9,
        "attributes": {"attempt": 1},
        "events": [],
        "status": "UNSET",
        **changes,
    }
    return json.dumps(fields)


def test_children_stand_indented_under_their_parent_in_order_of_start_with_times() -> None:
    lines = render_timeline(
        [
            _span("c", "a", 60, 100, service="gpu_worker", attributes={"attempt": 2}),
            _span("b", "a", 10, 35, service="scheduler"),
            _span("d", "b", 20, 30, is_error=True),
            _span("a", None, 0, 100),
        ]
    )
    assert lines[0] == "trace t1   100.0 ms, 4 spans"
    assert [line.split(" |")[0].split() for line in lines[1:]] == [
        ["gateway:", "span-a", "0.0", "+", "100.0"],
        ["scheduler:", "span-b", "10.0", "+", "25.0"],
        ["gateway:", "span-d", "20.0", "+", "10.0"],
        ["gpu_worker:", "span-c", "60.0", "+", "40.0"],
    ]
    assert [len(line) - len(line.lstrip()) for line in lines[1:]] == [0, 2, 4, 2]
    assert lines[1].endswith("|" + "#" * 32 + "|")
    assert lines[3].endswith("| ERROR")
    assert lines[4].endswith("attempt=2")
    assert lines[4].split("|")[1].index("#") == 19


def test_a_span_without_its_parent_and_a_loop_of_spans_are_still_shown_once() -> None:
    assert len(render_timeline([_span("a", "lost", 0, 1)])) == 2
    assert len(render_timeline([_span("a", "a", 0, 1), _span("b", "a", 0, 1)])) == 3
    assert render_timeline([]) == []


def test_a_trace_is_connected_when_one_root_carries_all_others() -> None:
    assert is_connected([_span("a", None, 0, 1), _span("b", "a", 0, 1)])
    assert not is_connected([_span("a", None, 0, 1), _span("b", "lost", 0, 1)])
    assert not is_connected([_span("a", None, 0, 1), _span("b", None, 0, 1)])


def test_spans_of_one_trace_are_read_from_all_files_and_half_lines_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "scheduler-1.jsonl").write_text(_line() + "\n" + _line(trace_id="t2", span_id="x") + "\n")
    (tmp_path / "gateway-2.jsonl").write_text(
        _line(span_id="b", service="gateway", status="ERROR") + "\n" + _line()[:40]
    )
    spans = read_spans(tmp_path, "t1")
    assert {(span.span_id, span.is_error) for span in spans} == {("a", False), ("b", True)}
    assert services_of(spans) == {"gateway", "scheduler"}
    assert parse_span("{}") is None
    assert parse_span("[1]") is None
