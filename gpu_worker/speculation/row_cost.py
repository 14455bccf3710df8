"""How long a step takes by its rows, as far as it decodes only. Pure.

    seconds = scale * shape(rows)

`shape` is measured when the model is loaded and corrected while it runs; `scale` follows what is common to all steps of
the moment: the length of contexts, what else the machine does. What was not seen for a while is believed less than what
is seen now, so that a change of circumstances does not speak for one number of rows and against another for long.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable

_NEW_WEIGHT = 0.1
_MAX_WEIGHT = 0.5
_MAX_RATIO = 3.0
_NUM_EXACT = 16


class RowCost:
    """Piecewise linear in the rows; beyond the largest known number as steep as up to it on average from half of it on."""

    def __init__(self, known: Iterable[tuple[int, float]]) -> None:
        """`known`: rows and their seconds, at least one pair; seconds are above 0."""
        self._shape: dict[int, float] = {}
        for rows, seconds in known:
            self._shape[rows] = seconds
        if not self._shape or min(self._shape) < 1 or not min(self._shape.values()) > 0:
            raise ValueError("known must name rows and seconds above 0")
        self._rows = sorted(self._shape)
        self._scale = 1.0
        self._num_observed = 0
        self._last_seen: dict[int, int] = {}

    def predict(self, rows: int) -> float:
        return self._scale * self._shape_at(rows)

    def observe(self, rows: int, seconds: float) -> None:
        """Learns from one step. An outlier counts as no more than some times what was expected."""
        self._num_observed += 1
        bucket = _bucket(rows)
        age = self._num_observed - self._last_seen.get(bucket, 0)
        self._last_seen[bucket] = self._num_observed
        expected = self._shape_at(rows)
        ratio = min(max(seconds / (self._scale * expected), 1 / _MAX_RATIO), _MAX_RATIO)
        staleness = min(_MAX_WEIGHT, max(_NEW_WEIGHT, 1 - (1 - _NEW_WEIGHT) ** age))
        if bucket not in self._shape:
            self._shape[bucket] = self._shape_at(bucket)
            insort(self._rows, bucket)
        self._shape[bucket] *= 1 + staleness * (ratio - 1)
        self._scale *= 1 + 2 * _NEW_WEIGHT * (1 - staleness) * (ratio - 1)

    def _shape_at(self, rows: int) -> float:
        if rows in self._shape:
            return self._shape[rows]
        place = bisect_left(self._rows, rows)
        if place == 0:
            return self._shape[self._rows[0]]
        left = self._rows[place - 1]
        if place == len(self._rows):
            return self._shape[left] + (rows - left) * self._last_slope()
        right = self._rows[place]
        share = (rows - left) / (right - left)
        return self._shape[left] + share * (self._shape[right] - self._shape[left])

    def _last_slope(self) -> float:
        last = self._rows[-1]
        if len(self._rows) == 1:
            return self._shape[last] / last
        middle = self._rows[min(bisect_left(self._rows, last // 2), len(self._rows) - 2)]
        return max(0.0, (self._shape[last] - self._shape[middle]) / (last - middle))


def _bucket(rows: int) -> int:
    """Small numbers exactly, larger ones up to the next eighth of a power of two."""
    if rows <= _NUM_EXACT:
        return rows
    step = 1 << ((rows - 1).bit_length() - 4)
    return -(-rows // step) * step
