"""How many proposed tokens each sequence of a step gets. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpu_worker.speculation.proposer import Rates

_WORTH_NOTHING = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """counts: tokens per sequence. gain: expected tokens per second over those of the step without any."""

    counts: tuple[int, ...]
    gain: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrice:
    """seconds: of a step by its rows. propose_seconds: by the most tokens that one sequence gets. target_s: rows that make a
    step take longer are not taken; None for no bound."""

    seconds: Callable[[int], float]
    propose_seconds: Callable[[int], float]
    target_s: float | None = None


def choose(offers: Sequence[Rates], *, num_rows: int, most: int, price: StepPrice) -> Choice:
    """The counts with the most expected tokens per second, none if nothing gains.

    offers: of each sequence that decodes in the step, none being an empty one. A token is worth the probability that it and
    all before it are right, so the best choice of n tokens are the n that are worth the most. num_rows: rows without any.
    """
    worth = sorted(_worth(offers), reverse=True)[:most]
    plain = len(offers) / price.seconds(num_rows)
    best, best_rate = 0, plain
    num_expected, depth = float(len(offers)), 0
    for count, (value, place, _) in enumerate(worth, start=1):
        num_expected += value
        depth = max(depth, -place)
        seconds = price.seconds(num_rows + count) + price.propose_seconds(depth)
        if price.target_s is not None and seconds > price.target_s:
            break
        rate = num_expected / seconds
        if rate > best_rate:
            best, best_rate = count, rate
    counts = [0] * len(offers)
    for _, _, sequence in worth[:best]:
        counts[sequence] += 1
    return Choice(counts=tuple(counts), gain=best_rate / plain)


def _worth(offers: Sequence[Rates]) -> list[tuple[float, int, int]]:
    """(worth, minus the place from 1, sequence): of tokens of equal worth the first of a sequence come first."""
    worth = []
    for sequence, rates in enumerate(offers):
        value = 1.0
        for place, rate in enumerate(rates, start=1):
            value *= rate
            if value < _WORTH_NOTHING:
                break
            worth.append((value, -place, sequence))
    return worth
