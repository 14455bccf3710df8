"""Figures of a benchmark, each with the limit it has to keep."""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured number. `at_most` and `at_least` are limits; without one the figure is only told."""

    name: str
    value: float
    at_most: float | None = None
    at_least: float | None = None
    note: str = ""

    @property
    def is_kept(self) -> bool:
        too_high = self.at_most is not None and self.value > self.at_most
        too_low = self.at_least is not None and self.value < self.at_least
        return not too_high and not too_low

    def __str__(self) -> str:
        limit = ""
        if self.at_most is not None and self.at_least is not None:
            limit = f"{self.at_least:g} to {self.at_most:g}"
        elif self.at_most is not None:
            limit = f"<= {self.at_most:g}"
        elif self.at_least is not None:
            limit = f">= {self.at_least:g}"
        verdict = "      " if not limit else "ok    " if self.is_kept else "MISSED"
        return f"{verdict} {self.name:<62} {self.value:>9.3f} {limit:<12} {self.note}".rstrip()


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def report(figures: Iterable[Figure]) -> int:
    """Prints the figures as they come; the exit status: 0 when all limits are kept."""
    num_missed = 0
    for figure in figures:
        print(figure)
        sys.stdout.flush()
        num_missed += not figure.is_kept
    print(f"{num_missed} limits missed" if num_missed else "all limits kept")
    return 1 if num_missed else 0
