"""Perplexity of a model through the engine's own model runner: the same products, attention and KV memory as when serving."""

import math
from collections.abc import Callable, Sequence

from gpu_worker.engine.model_runner import ModelRunner
from gpu_worker.engine.sequence import PlannedSequence, StepPlan


def measure_perplexity(
    runner: ModelRunner,
    token_ids: Sequence[int],
    *,
    window: int,
    step_tokens: int,
    block_size: int,
    on_progress: Callable[[float], None] = lambda _: None,
) -> float:
    """Of every token of whole windows but the first of each, whose context is the window before it.

    A window is computed in chunks of `step_tokens`, over the first blocks of the KV memory. Tokens behind the last whole
    window are left out. Raises ValueError when there is no whole window.
    """
    num_windows = len(token_ids) // window
    if num_windows == 0 or window < 2:  # noqa: PLR2004 - one token to look at, one to predict
        raise ValueError(f"{len(token_ids)} tokens hold no window of {window}")
    table = tuple(range(-(-window // block_size)))
    total = 0.0
    for number in range(num_windows):
        tokens = tuple(token_ids[number * window : (number + 1) * window])
        for start in range(0, window - 1, step_tokens):
            chunk = tokens[start : min(start + step_tokens, window - 1)]
            planned = PlannedSequence(
                sequence_id="perplexity", start=start, token_ids=chunk, block_table=table, is_sampled=False
            )
            next_ids = tokens[start + 1 : start + 1 + len(chunk)]
            total += float(runner.log_probabilities(StepPlan(sequences=(planned,)), next_ids).double().sum())
        on_progress((number + 1) / num_windows)
    return math.exp(-total / (num_windows * (window - 1)))
