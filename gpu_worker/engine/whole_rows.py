"""Weights of all tokens of a row: for rows without top-k, and for log probabilities.

One row at a time in memory of its own, so that every row is computed by the very same calls in any batch; by one thread,
since two would meet at a barrier for every row, which is slow when another process has one of the cores.
"""

import numpy as np
import numpy.typing as npt

from gpu_worker.engine.candidates import Candidates, FloatArray
from gpu_worker.engine.draws import Draw

_CHUNK = 256
_MIN_TEMPERATURE = 1e-30
_FIRST_SHARE = 1e-5
_SHARES = (1e-3, 1e-4)
_SLACK = 1e-6

DoubleArray = npt.NDArray[np.float64]


class RowWeights:
    """The weights exp((logit - largest) / temperature) of one row, in 32 bits; `weigh` replaces them by another row's.

    Temperatures below 1e-30 count as 1e-30, where every unequal logit already has weight 0.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        # Zeros behind the vocabulary fill the last chunk.
        padded = np.zeros(-(-vocab_size // _CHUNK) * _CHUNK, dtype=np.float32)
        self._weights = padded[:vocab_size]
        self._chunks = padded.reshape(-1, _CHUNK)
        self._ends: DoubleArray = np.zeros(0)
        self._logits: FloatArray = np.zeros(0, dtype=np.float32)

    @property
    def total(self) -> float:
        return float(self._ends[-1])

    def weigh(self, logits: FloatArray, temperature: float) -> None:
        """Looks at `logits` again when they are restricted."""
        self._logits = logits
        weights = self._weights
        with np.errstate(over="ignore"):
            np.subtract(logits, logits.max(), out=weights)
            if temperature != 1:
                np.divide(weights, np.float32(max(temperature, _MIN_TEMPERATURE)), out=weights)
        np.exp(weights, out=weights)
        self._ends = np.cumsum(self._chunks.sum(axis=1), dtype=np.float64)

    def draw(self, uniform: float) -> int:
        """One token when nothing is left out: the first whose cumulative weight exceeds uniform times total.

        In two levels, chunks and then the tokens of a chunk, so that no accumulation runs over the whole vocabulary.
        """
        target = uniform * self._ends[-1]
        chunk = _first_above(self._ends, target)
        before = self._ends[chunk - 1] if chunk else 0.0
        inside = np.cumsum(self._chunks[chunk], dtype=np.float64)
        return chunk * _CHUNK + _first_above(inside, target - before)

    def restrict(self, draw: Draw) -> Candidates:
        """All tokens that top-p and min-p of `draw` keep, and a few more; the exact test is the candidates' business."""
        # Less than what the exact test keeps, by more than the weights can be off.
        least = draw.min_p * (1 - 1e-4)
        token_ids = self._nucleus(draw.top_p, least) if draw.top_p < 1 else self._above(least)
        return Candidates(token_ids=token_ids, logits=self._logits[token_ids], counts=np.array([len(token_ids)]))

    def _nucleus(self, share: float, least: float) -> npt.NDArray[np.int64]:
        """Tokens among which the nucleus is, without those of less weight than `least`.

        If the tokens of at least some weight reach the share, then none of less weight is in the nucleus. And all of less
        weight than (1 - share) total / vocab_size do not have 1 - share together: none of them is, whatever the weights.
        """
        total = self.total
        bound = 0.5 * (1 - share) * total / self._vocab_size
        wanted = (share + _SLACK) * total
        token_ids = self._above(max(_FIRST_SHARE * total, bound, least))
        weights = self._weights[token_ids]
        if weights.sum(dtype=np.float64) < wanted:
            return self._above(max(bound, least))
        for first_share in _SHARES:
            is_above = weights >= np.float32(first_share * total)
            if weights[is_above].sum(dtype=np.float64) >= wanted:
                return token_ids[is_above]
        return token_ids

    def _above(self, least: float) -> npt.NDArray[np.int64]:
        return np.flatnonzero(self._weights >= np.float32(least))


def _first_above(cumulative: DoubleArray, target: float) -> int:
    """Rounding can put a target at the very end: then the last index whose addend is positive."""
    last = np.searchsorted(cumulative, cumulative[-1])
    return int(min(np.searchsorted(cumulative, target, side="right"), last))
