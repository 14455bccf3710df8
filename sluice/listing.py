"""Rows and facts on stdout: as a table for people, as CSV for spreadsheets, as JSON for programs."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import assert_never

from sluice.console import say, write_text

Value = str | int | float | datetime | tuple[str, ...] | None
_WORDS_FOR_NONE = {"allowed_models": "all", "expires_at": "never"}
_LIMIT_STARTS = ("requests_per_", "tokens_per_", "max_concurrent")


class Format(StrEnum):
    """How results are printed."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"


def write_rows(
    columns: Sequence[str],
    rows: Sequence[Mapping[str, Value]],
    form: Format,
    *,
    shown: Sequence[str] | None = None,
    empty: str = "nothing found",
) -> None:
    """Each row has all `columns`; a table shows only those in `shown`. Nothing at all is told on stderr."""
    match form:
        case Format.JSON:
            write_text(f"{json.dumps([_json_fields(row) for row in rows], indent=2)}\n")
        case Format.CSV:
            text = io.StringIO()
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows([[_csv_cell(row[name]) for name in columns] for row in rows])
            write_text(text.getvalue())
        case Format.TABLE:
            heads = shown if shown is not None else columns
            cells = [[_cell(name, row[name]) for name in heads] for row in rows]
            for line in table([name.upper() for name in heads], cells) if rows else ():
                write_text(f"{line}\n")
        case _:
            assert_never(form)
    if not rows:
        say(empty)


def write_facts(facts: Mapping[str, Value], form: Format) -> None:
    """One thing: a line per fact, or one object, or one row."""
    match form:
        case Format.JSON:
            write_text(f"{json.dumps(_json_fields(facts), indent=2)}\n")
        case Format.CSV:
            write_rows(list(facts), [facts], form)
        case Format.TABLE:
            width = max(map(len, facts)) + 2
            for name, value in facts.items():
                write_text(f"{name:<{width}}{_cell(name, value)}\n")
        case _:
            assert_never(form)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their longest cell."""
    lines = [heads, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _cell(name: str, value: Value) -> str:
    if value is None:
        return "unlimited" if name.startswith(_LIMIT_STARTS) else _WORDS_FOR_NONE.get(name, "-")
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return (",".join(value) or "none") if isinstance(value, tuple) else str(value)


def _csv_cell(value: Value) -> str:
    if value is None:
        return ""
    return value.isoformat() if isinstance(value, datetime) else _cell("", value)


def _json_fields(row: Mapping[str, Value]) -> dict[str, object]:
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in row.items()}
