"""Draws the next token of each sampled row.

In this order: logit bias, bans (min_output_tokens), repetition, presence and frequency penalties, temperature, top-k,
top-p, min-p. A step differs from the usual definitions in this much: tokens equal to the last one that top-k or top-p
keeps stay too, so that no order among equals decides; top-p counts its share of what top-k left, and min-p compares with
the most probable token, which the two always keep. Temperature 0 takes the largest logit, of equals the first.

The random number of a row depends on its seed and position alone, and the token is found by inverting the cumulative
distribution in vocabulary order: the same logits give the same token in any batch and in any attempt. Where compiled
kernels do it and where numpy does, tokens are the same but at a border that rounding moves (`FusedRows` says how far).
"""

from collections.abc import Callable, Sequence

import torch

from gpu_worker.engine.draws import Draw
from gpu_worker.engine.execution import NOT_FINITE, Sampled, SampleFailure, SampleRequest
from gpu_worker.engine.logit_edits import LogitEdits
from gpu_worker.engine.penalties import EditsBySequence, is_edited
from gpu_worker.engine.row_sampler import RowSampler, make_row_sampler

_GREEDY = Draw(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, uniform=0.0)
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

    def __init__(self, make_rows: Callable[[torch.Tensor], RowSampler] = make_row_sampler) -> None:
        self._make_rows = make_rows
        self._edits = EditsBySequence()

    @property
    def num_remembered(self) -> int:
        """Sequences of which something is remembered."""
        return len(self._edits)

    def forget(self, sequence_id: str) -> None:
        """Drops what is remembered of a sequence; it is made anew from the next request. Unknown ids are ignored."""
        self._edits.forget(sequence_id)

    def sample(self, logits: torch.Tensor, requests: Sequence[SampleRequest]) -> list[Sampled | SampleFailure]:
        """One outcome per row of `logits` [R, vocab_size] (fp32), in order.

        Rows do not influence each other. `logits` is written to on the way and is as it was in the end; a tensor of inference
        mode therefore needs the mode here too.
        """
        assert len(logits) == len(requests), "one request per row"
        if not requests:
            return []
        logits = logits.contiguous()
        row_sampler = self._make_rows(logits)
        failures = dict.fromkeys(row_sampler.find_not_finite(), NOT_FINITE)
        rows = [row for row in range(len(requests)) if row not in failures]
        limits = ((row, requests[row].sampling.logprobs) for row in rows)
        measured = row_sampler.measure({row: limit for row, limit in limits if limit is not None})
        changed = [row for row in rows if _is_changed(requests[row])]
        edits = LogitEdits(logits, self._edits)
        try:
            edits.apply(changed, requests)
            failures |= edits.failures
            vocab_size = logits.shape[1]
            draws = {row: draw_of(requests[row], vocab_size) for row in rows if row not in failures}
            tokens = row_sampler.choose(draws, [row for row in changed if row in draws])
        finally:
            edits.undo()
        return [
            SampleFailure(reason=failures[row], is_suspect=failures[row] == NOT_FINITE)
            if row in failures
            else Sampled(token_id=tokens[row], logprob=measured[row].of(tokens[row]) if row in measured else None)
            for row in range(len(requests))
        ]


def draw_of(request: SampleRequest, vocab_size: int) -> Draw:
    """How the next token of a request is drawn."""
    sampling = request.sampling
    if sampling.temperature == 0:
        return _GREEDY
    return Draw(
        temperature=sampling.temperature,
        top_k=sampling.top_k if sampling.top_k < vocab_size else 0,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        uniform=uniform(sampling.seed, request.position),
    )


def _is_changed(request: SampleRequest) -> bool:
    return bool(request.banned_token_ids) or is_edited(request.sampling)
