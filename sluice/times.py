"""Times and durations as a person writes them on the command line."""

import re
from datetime import UTC, datetime, timedelta

from sluice.errors import UserError

_AGE_FORM = re.compile(r"(\d{1,6})([smhd])\Z")
_UNITS = {"s": timedelta(seconds=1), "m": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1)}


def parse_since(text: str, now: datetime, option: str = "--since") -> datetime:
    """An age ("90s", "30m", "12h", "7d") or a time in ISO 8601, in UTC where it names no zone. Raises UserError."""
    try:
        age = _AGE_FORM.match(text)
        if age is not None:
            return now - int(age[1]) * _UNITS[age[2]]
        time = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise UserError(f"{option} {text!r}: give an age as 90s, 30m, 12h, 7d, or a time as 2026-01-31T12:00") from None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def parse_span(text: str, option: str) -> timedelta:
    """A duration: "90s", "30m", "12h", "7d". Raises UserError."""
    span = _AGE_FORM.match(text)
    if span is None:
        raise UserError(f"{option} {text!r}: give a duration as 90s, 30m, 12h, 7d")
    return int(span[1]) * _UNITS[span[2]]
