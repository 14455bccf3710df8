"""Draws the next token of each sampled row: greedy, or temperature, then top-k, then top-p.

The random number of a row depends on its seed and position alone, and the token is found by inverting the cumulative
distribution in vocabulary order: the same logits give the same token in any batch, on any device, in any attempt.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from gpu_worker.engine.execution import SampleRequest

_MASK = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_CHUNK = 256
_NUCLEUS_WIDTH = 512
_Number = TypeVar("_Number", int, float)


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


@torch.inference_mode()
def sample(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> list[int | None]:
    """One token per row of `logits` [R, vocab_size] (fp32); None for a row that holds NaN or infinity.

    Rows do not influence each other. `logits` is not changed.
    """
    # A sum is not finite if any addend is not, and costs one pass.
    is_finite = torch.isfinite(logits.sum(-1, dtype=torch.float64)).tolist()
    tokens: list[int | None] = [None] * len(requests)
    greedy = [row for row, request in enumerate(requests) if is_finite[row] and request.sampling.temperature == 0]
    drawn = [row for row, request in enumerate(requests) if is_finite[row] and request.sampling.temperature > 0]
    if greedy:
        _fill(tokens, greedy, _rows(logits, greedy).argmax(-1))
    if drawn:
        _fill(tokens, drawn, _draw(_rows(logits, drawn), [requests[row] for row in drawn]))
    return tokens


def _rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """The chosen rows; without a copy when these are all."""
    return logits if len(rows) == len(logits) else logits[rows]


def _fill(tokens: list[int | None], rows: list[int], values: torch.Tensor) -> None:
    for row, token in zip(rows, values.tolist(), strict=True):
        tokens[row] = token


def _draw(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> torch.Tensor:
    temperatures = _column(logits, [request.sampling.temperature for request in requests])
    # Shifted first: the largest becomes 0 and no temperature, however small, can overflow.
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperatures
    _restrict(scaled, [request.sampling.top_k for request in requests], lambda k: 0 < k < logits.shape[1], _top_k_floor)
    _restrict(scaled, [request.sampling.top_p for request in requests], lambda p: p < 1, _top_p_floor)
    uniforms = [uniform(request.sampling.seed, request.position) for request in requests]
    return _invert(scaled.exp(), torch.tensor(uniforms, dtype=torch.float64, device=logits.device))


def _column(like: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _restrict(
    scaled: torch.Tensor,
    values: Sequence[_Number],
    is_on: Callable[[_Number], bool],
    floor: Callable[[torch.Tensor, Sequence[_Number]], torch.Tensor],
) -> None:
    """Rows whose value is on lose, in place, everything below their floor. Equals of the floor stay."""
    rows = [row for row, value in enumerate(values) if is_on(value)]
    if rows:
        chosen = scaled[rows]
        below = chosen < floor(chosen, [values[row] for row in rows])
        scaled[rows] = chosen.masked_fill(below, -torch.inf)


def _top_k_floor(scaled: torch.Tensor, limits: Sequence[int]) -> torch.Tensor:
    """The k-th largest value of each row, [R, 1]."""
    largest = scaled.topk(max(limits), dim=-1).values
    index = torch.tensor(limits, device=scaled.device)[:, None] - 1
    return largest.gather(1, index)


def _top_p_floor(scaled: torch.Tensor, limits: Sequence[float]) -> torch.Tensor:
    """The smallest value of each row's nucleus (arXiv:1904.09751), [R, 1].

    The nucleus is the fewest largest values that together have at least probability p. They are nearly always among the
    first few hundred, so that the whole row is only sorted when they are not.
    """
    wanted = torch.tensor(limits, dtype=torch.float64, device=scaled.device)[:, None]
    total = scaled.exp().sum(-1, keepdim=True, dtype=torch.float64)
    width = min(_NUCLEUS_WIDTH, scaled.shape[1])
    while True:
        largest = scaled.topk(width, dim=-1).values
        cumulative = (largest.exp().double().cumsum(-1) / total).contiguous()
        last = torch.searchsorted(cumulative, wanted)
        if width == scaled.shape[1] or bool((last < width).all()):
            return largest.gather(1, last.clamp(max=width - 1))
        width = scaled.shape[1]


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """First token whose cumulative weight exceeds uniform times total, [R]; never one of weight 0.

    In two levels, chunks and then tokens of a chunk, so that no cumulative sum runs over the whole vocabulary.
    """
    num_rows, vocab_size = weights.shape
    padded = torch.nn.functional.pad(weights, (0, -vocab_size % _CHUNK)).view(num_rows, -1, _CHUNK)
    chunk_ends = padded.sum(-1, dtype=torch.float64).cumsum(-1)
    targets = uniforms[:, None] * chunk_ends[:, -1:]
    chunks = _first_above(chunk_ends, targets)
    before = torch.where(chunks > 0, chunk_ends.gather(1, (chunks - 1).clamp(min=0)), 0.0)
    rows = padded[torch.arange(num_rows, device=weights.device), chunks[:, 0]]
    tokens = _first_above(rows.double().cumsum(-1), targets - before)
    return (chunks * _CHUNK + tokens)[:, 0]


def _first_above(cumulative: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Index of the first cumulative sum above its target, [R, 1].

    Rounding can put a target at the very end: then the last index whose addend is positive.
    """
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(torch.searchsorted(cumulative, targets, right=True), last)
