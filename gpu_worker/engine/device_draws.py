"""Draws tokens where the logits are, so that neither they nor the tokens have to travel before the next step begins.

The rules of gpu_worker/engine/sampler.py without edits of logits, in fp64: tokens differ from those of the host only where
a uniform, or the share at which a nucleus ends, is within rounding of a token's border. Nothing is sorted: the smallest
logit that top-k or top-p keeps is found by bisection over the bits of fp32, so that equals stay together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch

from gpu_worker.attention.triton_step import Integers
from gpu_worker.engine.draws import Draw

NOT_FINITE_ID = -1
"""Drawn from a row whose logits are not all finite."""
_LEAST, _MOST = -(1 << 31), (1 << 31) - 1
_BITS = 32


class DrawKind(StrEnum):
    """What the most demanding row of a batch needs."""

    GREEDY = "greedy"
    WHOLE = "whole"
    LIMITED = "limited"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawTensors:
    """How each row [R] is drawn: fp64 temperature, top_p, min_p and uniform, int32 top_k. Fields as in Draw."""

    numbers: torch.Tensor
    """fp64 [4, R]"""
    top_k: torch.Tensor


def kind_of(draws: Sequence[Draw]) -> DrawKind:
    if all(draw.temperature == 0 for draw in draws):
        return DrawKind.GREEDY
    return DrawKind.WHOLE if all(draw.is_whole for draw in draws if draw.temperature > 0) else DrawKind.LIMITED


def draw_sections(draws: Sequence[Draw], num_rows: int) -> tuple[Integers, Integers]:
    """DrawTensors as sections of a page; rows without a draw are greedy."""
    numbers = np.zeros((4, num_rows), dtype=np.float64)
    numbers[1] = 1
    top_k = np.zeros(num_rows, dtype=np.int32)
    for row, draw in enumerate(draws):
        numbers[:, row] = draw.temperature, draw.top_p, draw.min_p, draw.uniform
        top_k[row] = draw.top_k
    return numbers.view(np.int32).reshape(-1), top_k


def read_sections(numbers: torch.Tensor, top_k: torch.Tensor) -> DrawTensors:
    """What `draw_sections` wrote, on the device."""
    return DrawTensors(numbers=numbers.view(torch.float64).view(4, -1), top_k=top_k)


def draw_rows(logits: torch.Tensor, draws: DrawTensors, kind: DrawKind) -> torch.Tensor:
    """int32 [R]: the token of each row of `logits` [R, vocab_size] (fp32), or NOT_FINITE_ID. No synchronisation."""
    best, tokens = logits.max(dim=-1)
    if kind is not DrawKind.GREEDY:
        temperature, top_p, min_p, uniform = draws.numbers
        is_greedy = temperature == 0
        divisor = torch.where(is_greedy, 1.0, temperature)[:, None]
        weights = torch.exp((logits - best[:, None]).double() / divisor)
        if kind is DrawKind.LIMITED:
            weights = _restrict(logits, weights, draws.top_k, top_p, min_p)
        tokens = torch.where(is_greedy, tokens, _invert(weights, uniform))
    is_finite = torch.isfinite(logits).all(dim=-1)
    return torch.where(is_finite, tokens, NOT_FINITE_ID).int()


def _restrict(
    logits: torch.Tensor, weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """The weights of what top-k, top-p and min-p keep, 0 elsewhere."""
    order = _ordered_bits(logits)
    floor = _largest_floor(order, torch.ones_like(weights), top_k.double())
    weights = torch.where((order < floor) & (top_k > 0)[:, None], 0.0, weights)
    floor = _largest_floor(order, weights, top_p * weights.sum(dim=-1))
    weights = torch.where((order < floor) & (top_p < 1)[:, None], 0.0, weights)
    return torch.where(weights < min_p[:, None], 0.0, weights)


def _ordered_bits(logits: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the logits. Adding 0 makes -0 and 0 one."""
    bits = (logits + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & _MOST)


def _largest_floor(order: torch.Tensor, amounts: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Of each row [R, 1], the largest floor at and above which the amounts reach what is wanted."""
    floor = torch.full((len(order), 1), _LEAST, dtype=torch.int64, device=order.device)
    for bit in reversed(range(_BITS)):
        higher = floor + (1 << bit)
        reached = torch.where(order >= higher, amounts, 0.0).sum(dim=-1) >= wanted
        floor = torch.where(reached[:, None], higher, floor)
    return floor


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """First index whose cumulative weight exceeds uniform times total; at the very end, the last of positive weight."""
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    found = (cumulative <= uniform[:, None] * total).sum(dim=-1)
    return torch.minimum(found, (cumulative < total).sum(dim=-1))
