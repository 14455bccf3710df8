"""Draws tokens from candidates: temperature, top-k, top-p, min-p, then the inverse of the CDF.

numpy alone, and on the host for every device. Nothing here sums across a padded width or a batch (accumulations run
from left to right, and the padding is at the end), so that a row has one result, whatever stands beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpu_worker.engine.candidates import Candidates, FloatArray, join

_MIN_WIDTH = 128

DoubleArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How one row is drawn. temperature: 0 takes the largest; top_k: 0 is off; uniform in [0, 1).

    total: the weight of the whole row where candidates are a part of it, in units of the largest weight; None where the
    share of top-p counts among the candidates themselves.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    uniform: float
    total: float | None = None

    @property
    def is_whole(self) -> bool:
        """Nothing is left out."""
        return self.top_k == 0 and self.top_p == 1 and self.min_p == 0


def draw_candidates(candidates: Candidates, draws: Sequence[Draw]) -> list[int]:
    """One token per row of candidates; every row has at least one, and a temperature above 0."""
    widths = candidates.counts.tolist()
    if max(widths) <= max(_MIN_WIDTH, 2 * min(widths)):
        return _draw_together(candidates, draws)
    # One flat row would blow up the padding of all: only rows of about one length are padded to the same.
    parts = candidates.split()
    rows_by_size: dict[int, list[int]] = {}
    for row, width in enumerate(widths):
        rows_by_size.setdefault(max(width, _MIN_WIDTH).bit_length(), []).append(row)
    tokens = [0] * len(draws)
    for rows in rows_by_size.values():
        drawn = _draw_together(join([parts[row] for row in rows]), [draws[row] for row in rows])
        for row, token in zip(rows, drawn, strict=True):
            tokens[row] = token
    return tokens


def _draw_together(candidates: Candidates, draws: Sequence[Draw]) -> list[int]:
    with np.errstate(over="ignore"):
        places = _draw_padded(candidates.padded(), draws)
    starts = np.cumsum(candidates.counts) - candidates.counts
    tokens: list[int] = candidates.token_ids[starts + places].tolist()
    return tokens


def _draw_padded(values: FloatArray, draws: Sequence[Draw]) -> npt.NDArray[np.int64]:
    """Index of the drawn candidate of each row of `values` [rows, width]."""
    temperatures = np.array([draw.temperature for draw in draws])[:, None]
    best = values.max(axis=1, keepdims=True).astype(np.float64)
    weights = np.exp((values - best) / temperatures)
    if any(draw.top_k or draw.top_p < 1 for draw in draws):
        descending = -np.sort(-values, axis=1)
        floors = _top_k_floors(descending, draws)
        if any(draw.top_p < 1 for draw in draws):
            sorted_weights = np.exp((descending - best) / temperatures)
            sorted_weights[descending < floors] = 0
            floors = np.maximum(floors, _top_p_floors(descending, sorted_weights, draws))
        weights[values < floors] = 0
    weights[weights < np.array([draw.min_p for draw in draws])[:, None]] = 0
    return _invert(weights, np.array([draw.uniform for draw in draws]))


def _top_k_floors(descending: FloatArray, draws: Sequence[Draw]) -> FloatArray:
    """The k-th largest value of each row, [rows, 1]; -inf where top-k is off."""
    width = descending.shape[1]
    places = np.array([min(draw.top_k, width) - 1 for draw in draws])[:, None]
    floors = np.take_along_axis(descending, np.maximum(places, 0), axis=1)
    return np.where(places < 0, np.float32(-np.inf), floors)


def _top_p_floors(descending: FloatArray, weights: DoubleArray, draws: Sequence[Draw]) -> FloatArray:
    """The smallest value of each row's nucleus (arXiv:1904.09751), [rows, 1]; -inf where top-p is off.

    The nucleus is the fewest largest values whose weights reach the share p of the total.
    """
    cumulative = np.cumsum(weights, axis=1)
    totals = [last if draw.total is None else draw.total for draw, last in zip(draws, cumulative[:, -1], strict=True)]
    shares = np.array([draw.top_p for draw in draws])[:, None]
    missing = (cumulative / np.array(totals)[:, None] < shares).sum(axis=1, keepdims=True)
    floors = np.take_along_axis(descending, np.minimum(missing, descending.shape[1] - 1), axis=1)
    return np.where(shares < 1, floors, np.float32(-np.inf))


def _invert(weights: DoubleArray, uniforms: DoubleArray) -> npt.NDArray[np.int64]:
    """First index of each row whose cumulative weight exceeds uniform times total; never one of weight 0.

    Rounding can put a target at the very end: then the last index whose weight is positive.
    """
    cumulative = np.cumsum(weights, axis=1)
    totals = cumulative[:, -1:]
    found = (cumulative <= uniforms[:, None] * totals).sum(axis=1)
    last = (cumulative < totals).sum(axis=1)
    places: npt.NDArray[np.int64] = np.minimum(found, last)
    return places
