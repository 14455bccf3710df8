"""Reads the spans that the services write and draws one trace as an indented timeline. Pure but for `read_spans`."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_NAME_WIDTH = 44
_BAR_WIDTH = 32
_ATTRIBUTES_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One finished span. Times are Unix nanoseconds."""

    trace_id: str
    span_id: str
    parent_id: str | None
    service: str
    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, object] = field(default_factory=dict)
    is_error: bool = False


def parse_span(line: str) -> Span | None:
    """The span of one JSON line; None for a line that is not one (its writer may be in the middle of it)."""
    try:
        fields = json.loads(line)
        return Span(
            trace_id=str(fields["trace_id"]),
            span_id=str(fields["span_id"]),
            parent_id=fields["parent_id"],
            service=str(fields["service"]),
            name=str(fields["name"]),
            start_ns=int(fields["start_unix_ns"]),
            end_ns=int(fields["end_unix_ns"]),
            attributes=dict(fields.get("attributes") or {}),
            is_error=fields.get("status") == "ERROR",
        )
    except (ValueError, KeyError, TypeError):
        return None


def read_spans(directory: Path, trace_id: str) -> list[Span]:
    """All spans of one trace that any process has written so far."""
    spans: list[Span] = []
    for path in sorted(directory.glob("*.jsonl")):
        with path.open(encoding="utf-8") as lines:
            parsed = (parse_span(line) for line in lines if trace_id in line)
            spans.extend(span for span in parsed if span is not None and span.trace_id == trace_id)
    return spans


def services_of(spans: Iterable[Span]) -> set[str]:
    return {span.service for span in spans}


def is_connected(spans: Sequence[Span]) -> bool:
    """Whether there is exactly one span without a parent and every other one's parent is among `spans`."""
    ids = {span.span_id for span in spans}
    roots = [span for span in spans if span.parent_id is None]
    return len(roots) == 1 and all(span.parent_id in ids for span in spans if span.parent_id is not None)


def render_timeline(spans: Sequence[Span]) -> list[str]:
    """One line per span: indented under its parent, with offset and length in ms and a bar on the common time axis.

    A span whose parent was not written stands at the left margin.
    """
    if not spans:
        return []
    start_ns = min(span.start_ns for span in spans)
    length_ns = max(1, max(span.end_ns for span in spans) - start_ns)
    lines = [f"trace {spans[0].trace_id}   {_ms(length_ns)} ms, {len(spans)} spans"]
    for span, depth in _walk(spans):
        label = f"{'  ' * depth}{span.service}: {span.name}"
        offset_ns, duration_ns = span.start_ns - start_ns, span.end_ns - span.start_ns
        bar = _bar(offset_ns / length_ns, duration_ns / length_ns)
        mark = " ERROR" if span.is_error else ""
        lines.append(
            f"{_fit(label)} {_ms(offset_ns):>9} +{_ms(duration_ns):>9} |{bar}|{mark}{_attributes(span)}".rstrip()
        )
    return lines


def _walk(spans: Sequence[Span]) -> Iterable[tuple[Span, int]]:
    """Depth first, siblings in order of start. Iterative and guarded: spans come from files and may form a loop."""
    ids = {span.span_id for span in spans}
    children: dict[str | None, list[Span]] = {}
    for span in sorted(spans, key=lambda one: (one.start_ns, one.span_id)):
        parent = span.parent_id if span.parent_id in ids and span.parent_id != span.span_id else None
        children.setdefault(parent, []).append(span)
    seen: set[str] = set()
    stack = [(span, 0) for span in reversed(children.get(None, []))]
    while stack:
        span, depth = stack.pop()
        if span.span_id in seen:
            continue
        seen.add(span.span_id)
        yield span, depth
        stack.extend((child, depth + 1) for child in reversed(children.get(span.span_id, [])))


def _bar(start: float, length: float) -> str:
    first = min(_BAR_WIDTH - 1, int(start * _BAR_WIDTH))
    size = max(1, min(_BAR_WIDTH - first, round(length * _BAR_WIDTH)))
    return " " * first + "#" * size + " " * (_BAR_WIDTH - first - size)


def _attributes(span: Span) -> str:
    shown = list(span.attributes.items())[:_ATTRIBUTES_SHOWN]
    return "".join(f" {key}={value}" for key, value in shown)


def _fit(label: str) -> str:
    return label.ljust(_NAME_WIDTH) if len(label) <= _NAME_WIDTH else label[: _NAME_WIDTH - 1] + "…"


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:.1f}"
