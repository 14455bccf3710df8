"""Where the time of a decode step goes: `python -m bench.step_profile --model DIR [DIR ...]`.

One process and one engine thread unless told otherwise, and processor time where there is one thread, so that what else
runs on the machine counts little. Models and numbers of rows take turns; each figure is the median of the repeats.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog
import torch

from gpu_worker.engine.execution import SampleRequest
from gpu_worker.engine.loading import EngineParts, load_parts
from gpu_worker.engine.sequence import PlannedSequence, StepPlan
from gpu_worker.engine.settings import EngineSettings
from gpu_worker.layers.rope import Rotation
from gpu_worker.models import llama
from service_kit.sampling import SamplingParams

BLOCK_SIZE = 16
_LINEARS = ("query_key_value", "attention_output", "gate_up", "down")
_ELEMENTWISE = ("rms_norm", "silu_and_multiply")


@dataclass(kw_only=True)
class Clock:
    """Seconds by operation of the step that runs, without what is timed inside of it."""

    now: Callable[[], float]
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    inner: list[float] = field(default_factory=lambda: [0.0])

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.inner.append(0.0)
            started = self.now()
            result = call(*args, **kwargs)
            taken = self.now() - started
            self.seconds[name] += taken - self.inner.pop()
            self.inner[-1] += taken
            return result

        return wrapper


class TimedLinear:
    """Implements Linear. Every public method of the linear that it stands for is timed under one name."""

    def __init__(self, linear: Any, name: str, clock: Clock) -> None:
        self._linear, self._name, self._clock = linear, name, clock

    def __call__(self, *args: Any) -> torch.Tensor:
        return self._clock.timed(self._name, self._linear)(*args)

    def __getattr__(self, attribute: str) -> Any:
        found = getattr(self._linear, attribute)
        return self._clock.timed(self._name, found) if callable(found) else found


def decode_plan(num_rows: int, context: int) -> tuple[StepPlan, list[SampleRequest]]:
    """`num_rows` sequences that decode behind `context` tokens each, greedily."""
    per_sequence = -(-(context + 1) // BLOCK_SIZE)
    sampling = SamplingParams(max_output_tokens=8, temperature=0.0, seed=0)
    planned = tuple(
        PlannedSequence(
            sequence_id=str(number),
            start=context,
            token_ids=(1000 + number,),
            block_table=tuple(range(number * per_sequence, (number + 1) * per_sequence)),
            is_sampled=True,
        )
        for number in range(num_rows)
    )
    requests = [
        SampleRequest(
            sequence_id=str(number), position=1, token_ids=(1000 + number,), num_prompt_tokens=1, sampling=sampling
        )
        for number in range(num_rows)
    ]
    return StepPlan(sequences=planned), requests


def fill_memory(parts: EngineParts) -> None:
    """Keys and values behind the sequences, which no step has written: memory that was never written is read from cache."""
    runner: Any = parts.runner
    runner._attention.blocks.normal_()  # noqa: SLF001 - a benchmark looks inside


def instrument(parts: EngineParts, clock: Clock) -> None:
    """Times the products, the attention and the sampler of a loaded model."""
    runner: Any = parts.runner
    model, attention = runner._model, runner._attention  # noqa: SLF001 - a benchmark looks inside
    model.whole_layers = None  # one call for a layer shows nothing of what is in it
    model.layers = [
        replace(layer, **{name: TimedLinear(getattr(layer, name), name, clock) for name in _LINEARS})
        for layer in model.layers
    ]
    model.head = TimedLinear(model.head, "head", clock)
    begin_step = clock.timed("attention: begin step", attention.begin_step)
    attention.begin_step = lambda rows: clock.timed("attention", begin_step(rows))
    runner._sampler.sample = clock.timed("sampling", runner._sampler.sample)  # noqa: SLF001


def instrument_functions(clock: Clock) -> None:
    """Times the functions that models work on rows with."""
    for name in _ELEMENTWISE:
        if hasattr(llama, name):
            setattr(llama, name, clock.timed(name, getattr(llama, name)))
    Rotation.apply = clock.timed("rotation", Rotation.apply)  # type: ignore[method-assign]


def profile(parts: EngineParts, clock: Clock, *, num_rows: int, context: int) -> dict[str, float]:
    """Milliseconds by operation of one step, and of the whole."""
    plan, requests = decode_plan(num_rows, context)
    clock.seconds.clear()
    step = clock.timed("everything else", parts.runner.run)
    started = clock.now()
    step(plan, requests)
    whole = clock.now() - started
    return {name: 1000 * seconds for name, seconds in clock.seconds.items()} | {"step": 1000 * whole}


def main() -> int:
    """Prints a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, nargs="+", required=True, help="model directories")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 64])
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kv-dtype", default="float32")
    arguments = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    clock = Clock(now=time.thread_time if arguments.threads == 1 else time.perf_counter)
    num_blocks = max(arguments.rows) * -(-(arguments.context + 1) // BLOCK_SIZE)
    settings = EngineSettings(
        threads=arguments.threads, num_blocks=max(num_blocks, 512), block_size=BLOCK_SIZE, kv_dtype=arguments.kv_dtype
    )
    loaded = {path.name: load_parts(path, settings) for path in arguments.model}
    for parts in loaded.values():
        fill_memory(parts)
    instrument_functions(clock)
    for parts in loaded.values():
        instrument(parts, clock)
    measured: dict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
    for _, (model, parts), num_rows in itertools.product(range(arguments.repeats + 1), loaded.items(), arguments.rows):
        measured[model, num_rows].append(profile(parts, clock, num_rows=num_rows, context=arguments.context))
    for model in loaded:
        columns = [measured[model, num_rows][1:] for num_rows in arguments.rows]
        print(f"\n{model}, ms of a step by rows" + "".join(f"{num_rows:>10}" for num_rows in arguments.rows))
        names = sorted({name for column in columns for name in column[0]}, key=lambda name: (name == "step", name))
        for name in names:
            medians = [statistics.median(each.get(name, 0.0) for each in column) for column in columns]
            print(f"{name:<{len(model) + 22}}" + "".join(f"{median:>10.2f}" for median in medians))
    return 0


if __name__ == "__main__":
    sys.exit(main())
