"""Log probabilities of the model's own distribution, for the rows that ask for them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gpu_worker.engine.candidates import FloatArray, find_largest
from gpu_worker.engine.whole_rows import RowWeights
from service_kit.delta import TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLogprobs:
    """The most probable tokens of a row, and what makes its other log probabilities of its logits."""

    logits: FloatArray
    log_total: float
    top: tuple[tuple[int, float], ...]

    def of(self, token_id: int) -> TokenLogprob:
        return TokenLogprob(logprob=_logprob(float(self.logits[token_id]), self.log_total), top=self.top)


def measure_rows(logits: torch.Tensor, limits: Sequence[int]) -> list[RowLogprobs]:
    """The raw distribution of each row of `logits` [R, vocab_size], with its `limits[i]` most probable tokens.

    Looks at `logits` again when a token is asked for: they have to have the same values then.
    """
    if not limits:
        return []
    vocab_size = logits.shape[1]
    candidates = find_largest(logits, [min(max(limit, 1), vocab_size) for limit in limits]).split()
    rows = logits.cpu().numpy()
    measured = []
    weights = RowWeights(vocab_size)
    for row, limit, part in zip(rows, limits, candidates, strict=True):
        weights.weigh(row, 1.0)
        log_total = float(part.logits.max()) + math.log(weights.total)
        largest = np.lexsort((part.token_ids, -part.logits))[:limit]
        logprobs = [_logprob(float(part.logits[place]), log_total) for place in largest]
        top = rank(part.token_ids[largest].tolist(), logprobs)
        measured.append(RowLogprobs(logits=row, log_total=log_total, top=top))
    return measured


def rank(token_ids: Sequence[int], logprobs: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """The most probable first, by the 32-bit value that a reader sees; what looks equal is in id order."""
    return tuple(sorted(zip(token_ids, logprobs, strict=True), key=lambda entry: (-entry[1], entry[0])))


def _logprob(logit: float, log_total: float) -> float:
    """Rounded to 32 bits, which the wire and the log keep exactly."""
    return float(np.float32(logit - log_total))
