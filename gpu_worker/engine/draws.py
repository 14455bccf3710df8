"""Draws tokens from candidates or from whole rows: temperature, top-k, top-p, min-p, then the inverse of the CDF.

numpy alone, and on the host for every device. Nothing here sums across a padded width or a batch (accumulations run
from left to right, and the padding is at the end), so that a row has one result, whatever stands beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpu_worker.engine.candidates import Candidates, FloatArray

_CHUNK = 256
_MIN_WIDE_TEMPERATURE = 1e-30
_MAX_PADDED = 1 << 18

DoubleArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How one row is drawn. temperature > 0; top_k: 0 is off; uniform in [0, 1).

    total: the weight of the whole row where candidates are a part of it, in units of the largest weight; None where the
    share of top-p counts among the candidates themselves.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    uniform: float
    total: float | None = None


def draw_candidates(candidates: Candidates, draws: Sequence[Draw]) -> list[int]:
    """One token per row of candidates; every row has at least one."""
    if len(draws) > 1 and len(draws) * int(candidates.counts.max()) > _MAX_PADDED:
        # One flat row would blow up the padding of all.
        return [draw_candidates(part, [draw])[0] for part, draw in zip(candidates.split(), draws, strict=True)]
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


def weigh_row(logits: FloatArray, temperature: float) -> FloatArray:
    """exp((logit - largest) / temperature), in 32 bits, filled up with zeros to whole chunks of 256.

    Temperatures below 1e-30 count as 1e-30, where every unequal logit already has weight 0.
    """
    weights = np.zeros(-(-len(logits) // _CHUNK) * _CHUNK, dtype=np.float32)
    part = weights[: len(logits)]
    with np.errstate(over="ignore"):
        np.subtract(logits, logits.max(), out=part)
        if temperature != 1:
            np.divide(part, np.float32(max(temperature, _MIN_WIDE_TEMPERATURE)), out=part)
        np.exp(part, out=part)
    return weights


def total_weight(weights: FloatArray) -> float:
    """Sum of `weigh_row`'s weights."""
    return float(weights.reshape(-1, _CHUNK).sum(axis=1, dtype=np.float64).sum())


def draw_row(logits: FloatArray, draw: Draw) -> int:
    """One token of a row of which nothing is left out.

    In two levels, chunks and then the tokens of a chunk, so that no accumulation runs over the whole vocabulary.
    """
    chunks = weigh_row(logits, draw.temperature).reshape(-1, _CHUNK)
    ends = np.cumsum(chunks.sum(axis=1, dtype=np.float64))
    target = draw.uniform * ends[-1]
    chunk = _first_above(ends, target)
    before = ends[chunk - 1] if chunk else 0.0
    return chunk * _CHUNK + _first_above(np.cumsum(chunks[chunk], dtype=np.float64), target - before)


def _first_above(cumulative: DoubleArray, target: float) -> int:
    last = np.searchsorted(cumulative, cumulative[-1])
    return int(min(np.searchsorted(cumulative, target, side="right"), last))


def find_restricted(logits: FloatArray, draw: Draw) -> tuple[Candidates, float]:
    """Candidates of a row with top-p or min-p and without top-k, and the weight of the whole row.

    All values below (1 - p) total / vocab_size have less than 1 - p together: none of them is in the nucleus.
    """
    weights = weigh_row(logits, draw.temperature)[: len(logits)]
    total = float(weights.sum(dtype=np.float64))
    # Halved, and a little less, so that no rounding leaves out what the exact test would keep.
    floor = max(0.5 * (1 - draw.top_p) * total / len(logits), draw.min_p * (1 - 1e-4))
    token_ids = np.flatnonzero(weights >= np.float32(floor))
    return Candidates(token_ids=token_ids, logits=logits[token_ids], counts=np.array([len(token_ids)])), total
