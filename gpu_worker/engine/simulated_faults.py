"""Faults that a prompt can ask of the simulated engine, to show what the service makes of them. Pure.

A marker stands anywhere in the prompt's text: `<<fault:NAME>>` or `<<fault:NAME=VALUE>>`. Markers work only where the
composition root switched them on.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

_FIELDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "crash": ("crash", lambda _: True),
    "hang": ("hang", lambda _: True),
    "slow": ("slow_s", float),
    "crash-after": ("crash_after", int),
    "crash-once-after": ("crash_once_after", int),
}
_MARKER = re.compile(r"<<fault:([a-z-]+)(?:=([0-9.]+))?>>")


class InvalidFaultError(ValueError):
    """A marker that names no fault, or a value that is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What happens when the sequence runs.

    crash: the process exits when the sequence runs for the first time. hang: the engine stops for ever at that point.
    slow: seconds added to each of its steps. crash_after: the process exits once this attempt has made that many tokens.
    crash_once_after: the same, but only in an attempt that continues no output.
    """

    crash: bool = False
    hang: bool = False
    slow_s: float = 0.0
    crash_after: int | None = None
    crash_once_after: int | None = None

    def crashes_now(self, *, num_made: int, is_resumed: bool) -> bool:
        """Whether the process exits before the step that would make token `num_made` + 1 of this attempt."""
        due = {self.crash_after, None if is_resumed else self.crash_once_after}
        return self.crash or num_made in due


NO_FAULTS = Faults()


def read_faults(text: str) -> Faults:
    """The faults that the markers in `text` ask for. Raises InvalidFaultError."""
    faults = NO_FAULTS
    for name, value in _MARKER.findall(text):
        if name not in _FIELDS:
            raise InvalidFaultError(f"fault {name}: not known")
        field, parse = _FIELDS[name]
        try:
            faults = replace(faults, **{field: parse(value)})
        except ValueError as error:
            raise InvalidFaultError(f"fault {name}: {value!r} is not a value") from error
    return faults
