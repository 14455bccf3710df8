"""Measures what rows cost: the steps that a decoding engine makes, before it makes them."""

import math
import time
from collections.abc import Sequence

from gpu_worker.engine.execution import Executor, SampleRequest
from gpu_worker.engine.sequence import PlannedSequence, StepPlan
from service_kit.sampling import SamplingParams

_NUMBERS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_ALWAYS = 8
_NUM_ROUNDS = 4
_PATIENCE_S = 1.5
_NAME = "warm-up"


def measure_rows(executor: Executor, *, most: int, block_size: int) -> tuple[tuple[int, float], ...]:
    """Rows and the seconds of a step of so many, all of one sequence; up to `most`, the larger ones while it goes quickly.

    Writes the first blocks.
    """
    started = time.perf_counter()
    measured: dict[int, float] = {}
    for _ in range(_NUM_ROUNDS):
        for rows in _NUMBERS:
            is_late = time.perf_counter() - started > _PATIENCE_S
            if rows <= most and not (is_late and (rows > _ALWAYS or rows in measured)):
                measured[rows] = min(measured.get(rows, math.inf), _seconds(executor, rows, block_size))
    executor.forget(_NAME)
    return tuple(_without_spikes(measured))


def _without_spikes(measured: dict[int, float]) -> list[tuple[int, float]]:
    """More rows take no less time, so what took longer than a step of more rows was disturbed."""
    kept: list[tuple[int, float]] = []
    for rows, seconds in sorted(measured.items(), reverse=True):
        kept.append((rows, min(seconds, kept[-1][1]) if kept else seconds))
    return kept[::-1]


def _seconds(executor: Executor, rows: int, block_size: int) -> float:
    token_ids = (0,) * rows
    planned = PlannedSequence(
        sequence_id=_NAME,
        start=0,
        token_ids=token_ids,
        block_table=tuple(range(-(-rows // block_size))),
        is_sampled=True,
        num_drafts=rows - 1,
    )
    requests = _requests(token_ids)
    started = time.perf_counter()
    executor.run(StepPlan(sequences=(planned,)), requests)
    return time.perf_counter() - started


def _requests(token_ids: tuple[int, ...]) -> Sequence[SampleRequest]:
    sampling = SamplingParams(max_output_tokens=len(token_ids), temperature=0.0)
    return [
        SampleRequest(
            sequence_id=_NAME,
            sampling=sampling,
            position=position,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
        )
        for position in range(1, len(token_ids) + 1)
    ]
