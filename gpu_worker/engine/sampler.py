"""Draws the next token of each sampled row.

In this order: logit bias, bans (min_output_tokens), repetition, presence and frequency penalties, temperature, top-k,
top-p, min-p. A step differs from the usual definitions in this much: tokens equal to the last one that top-k or top-p
keeps stay too, so that no order among equals decides; top-p counts its share of what top-k left, and min-p compares with
the most probable token, which the two always keep. Temperature 0 takes the largest logit, of equals the first.

The random number of a row depends on its seed and position alone, and the token is found by inverting the cumulative
distribution in vocabulary order: the same logits give the same token in any batch, on any device, in any attempt. The
device compares and gathers, which is exact everywhere; exponentials and sums are the host's.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from gpu_worker.engine.candidates import find_largest, join
from gpu_worker.engine.draws import Draw, draw_candidates
from gpu_worker.engine.execution import NOT_FINITE, Sampled, SampleFailure, SampleRequest
from gpu_worker.engine.logit_edits import LogitEdits
from gpu_worker.engine.logprobs import measure_rows
from gpu_worker.engine.penalties import EditsBySequence
from gpu_worker.engine.whole_rows import RowWeights
from service_kit.sampling import SamplingParams

_MASK = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64 bits in which every bit counts."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that belongs to (seed, position): 53 bits of a counter-based hash.

    Part of what a generation's output is: another function would change every seeded output.
    """
    stream = _mix((seed + _GOLDEN_GAMMA) & _MASK)
    return float(_mix((stream + position * _GOLDEN_GAMMA) & _MASK) >> 11) / float(1 << 53)


class Sampler:
    """Draws tokens, and remembers between the steps of a sequence what its penalties count."""

    def __init__(self) -> None:
        self._edits = EditsBySequence()

    @property
    def num_remembered(self) -> int:
        """Sequences of which something is remembered."""
        return len(self._edits)

    def forget(self, sequence_id: str) -> None:
        """Drops what is remembered of a sequence; it is made anew from the next request. Unknown ids are ignored."""
        self._edits.forget(sequence_id)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, requests: Sequence[SampleRequest]) -> list[Sampled | SampleFailure]:
        """One outcome per row of `logits` [R, vocab_size] (fp32), in order.

        Rows do not influence each other. `logits` is written to on the way and is as it was in the end.
        """
        assert len(logits) == len(requests), "one request per row"
        if not requests:
            return []
        logits = logits.contiguous()
        failures = dict.fromkeys(_find_not_finite(logits), NOT_FINITE)
        rows = [row for row in range(len(requests)) if row not in failures]
        measured_rows = [row for row in rows if requests[row].sampling.logprobs is not None]
        limits = [requests[row].sampling.logprobs or 0 for row in measured_rows]
        measured = dict(zip(measured_rows, measure_rows(_select(logits, measured_rows), limits), strict=True))
        edits = LogitEdits(logits, self._edits)
        try:
            edits.apply(rows, requests)
            failures |= edits.failures
            tokens = _choose(logits, [row for row in rows if row not in failures], requests)
        finally:
            edits.undo()
        return [
            SampleFailure(reason=failures[row])
            if row in failures
            else Sampled(token_id=tokens[row], logprob=measured[row].of(tokens[row]) if row in measured else None)
            for row in range(len(requests))
        ]


def _find_not_finite(logits: torch.Tensor) -> list[int]:
    """Rows that hold NaN or infinity."""
    # A sum is not finite if any addend is not, and costs one quick pass; large finite addends are told apart afterwards.
    suspects = np.flatnonzero(~np.isfinite(logits.sum(-1).cpu().numpy())).tolist()
    return [row for row in suspects if not bool(torch.isfinite(logits[row]).all())]


def _select(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """The chosen rows; without a copy when these are all."""
    return logits if len(rows) == len(logits) else logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)]


def _choose(logits: torch.Tensor, rows: Sequence[int], requests: Sequence[SampleRequest]) -> dict[int, int]:
    """The token of each of `rows`."""
    greedy = [row for row in rows if requests[row].sampling.temperature == 0]
    tokens = dict(zip(greedy, _argmax(_select(logits, greedy)), strict=True)) if greedy else {}
    vocab_size = logits.shape[1]
    draws = {
        row: _draw(requests[row].sampling, requests[row].position, vocab_size)
        for row in rows
        if requests[row].sampling.temperature > 0
    }
    limited = [row for row, draw in draws.items() if draw.top_k]
    parts_by_row: list[int] = [*limited]
    parts = [find_largest(_select(logits, limited), [draws[row].top_k for row in limited])] if limited else []
    whole = [row for row, draw in draws.items() if not draw.top_k]
    if whole:
        weights = RowWeights(vocab_size)
        for row, values in zip(whole, _select(logits, whole).cpu().numpy(), strict=True):
            weights.weigh(values, draws[row].temperature)
            if draws[row].top_p == 1 and draws[row].min_p == 0:
                tokens[row] = weights.draw(draws[row].uniform)
            else:
                parts.append(weights.restrict(draws[row]))
                parts_by_row.append(row)
                draws[row] = replace(draws[row], total=weights.total)
    if parts:
        drawn = draw_candidates(join(parts), [draws[row] for row in parts_by_row])
        tokens |= zip(parts_by_row, drawn, strict=True)
    return tokens


def _draw(sampling: SamplingParams, position: int, vocab_size: int) -> Draw:
    return Draw(
        temperature=sampling.temperature,
        top_k=sampling.top_k if sampling.top_k < vocab_size else 0,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        uniform=uniform(sampling.seed, position),
    )


def _argmax(logits: torch.Tensor) -> list[int]:
    """The largest of each row, of equals the first."""
    if logits.device.type == "cpu":
        # Ten times faster than torch's.
        tokens: list[int] = logits.numpy().argmax(axis=-1).tolist()
        return tokens
    return [int(token) for token in logits.argmax(-1).tolist()]
