"""How the engine's core behaves on a real model: `python -m bench.engine_core` (or `make bench-core`).

Everything runs in this process, without the process border and without gRPC. Each figure is a ratio of two measurements of
one run, so that the machine's speed does not count; speeds themselves are the business of other benchmarks.
"""

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from bench.figures import Figure, report
from gpu_worker.engine.engine import NativeEngine
from gpu_worker.engine.loading import EngineParts, load_parts, make_engine
from gpu_worker.engine.port import SequenceSpec
from gpu_worker.engine.settings import EngineSettings
from service_kit.sampling import SamplingParams

DEFAULT_MODEL = Path(".sluice/models/smollm2-135m-instruct")
SETTINGS = EngineSettings(num_blocks=2048, max_running=64, token_budget=512)
FULL_SAMPLING = {
    "temperature": 0.8,
    "top_p": 0.95,
    "top_k": 50,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.2,
}
NUM_PAIRS = 5


@dataclass(kw_only=True)
class Run:
    """Times in seconds since the first step of a run, by the engine's steps."""

    token_times: dict[str, list[float]] = field(default_factory=dict)
    step_seconds: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(self.step_seconds)

    def largest_gap(self, names: list[str], *, after: float = 0.0) -> float:
        """Longest time that any of the sequences went without a token, from `after` on."""
        gaps = [0.0]
        for name in names:
            times = self.token_times[name]
            gaps += [right - left for left, right in itertools.pairwise(times) if right >= after]
        return max(gaps)


class Bench:
    """A loaded model; every measurement gets a fresh engine over it, so that no cache carries over."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._random = random.Random(7)  # noqa: S311 - token ids, not secrets

    def engine(self) -> NativeEngine:
        return make_engine(self._parts, SETTINGS)

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(1000, 40_000) for _ in range(num_tokens))

    def spec(self, name: str, prompt: tuple[int, ...], *, num_output: int, **sampling: float) -> SequenceSpec:
        params = SamplingParams(
            max_output_tokens=num_output,
            ignore_eos=True,
            **{"temperature": 0.0, "seed": len(name), **sampling},  # type: ignore[arg-type]
        )
        return SequenceSpec(
            sequence_id=name, prompt_token_ids=prompt, output_token_ids=(), sampling=params, priority=1, nonce=0
        )


def run(engine: NativeEngine, specs: list[SequenceSpec], *, late: tuple[int, SequenceSpec] | None = None) -> Run:
    """Runs to the end; `late` is a sequence that comes after so many steps."""
    for spec in specs:
        engine.add(spec)
    result = Run()
    started = time.perf_counter()
    while engine.has_work():
        if late is not None and len(result.step_seconds) == late[0]:
            engine.add(late[1])
        step_started = time.perf_counter()
        output = engine.step()
        now = time.perf_counter()
        result.step_seconds.append(now - step_started)
        for each in output.outputs:
            if each.finish is not None and each.finish.failure is not None:
                raise RuntimeError(f"{each.sequence_id}: {each.finish.failure}")
            if each.delta is not None:
                result.token_times.setdefault(each.sequence_id, []).append(now - started)
    return result


def measure_shared_prefix(bench: Bench) -> Iterator[Figure]:
    """16 requests with a common prefix of 1,000 tokens: one after another, and all at once."""
    prefix, num_rest = bench.prompt(1000), 24
    specs = [bench.spec(f"s{number}", prefix + bench.prompt(num_rest), num_output=2) for number in range(16)]
    needed = len(prefix) + num_rest * len(specs)
    engine = bench.engine()
    first_token = [run(engine, [spec]).token_times[spec.sequence_id][0] for spec in specs]
    computed = engine.load_report().num_computed_prompt_tokens
    yield Figure(name="shared prefix: prompt tokens computed / needed", value=computed / needed, at_most=1.1)
    later = statistics.median(first_token[1:]) / first_token[0]
    yield Figure(name="shared prefix: median time to first token / that of the first", value=later, at_most=0.25)
    engine = bench.engine()
    run(engine, specs)
    computed = engine.load_report().num_computed_prompt_tokens
    yield Figure(name="shared prefix, all at once: tokens computed / needed", value=computed / needed, at_most=1.1)


def measure_bookkeeping(bench: Bench) -> Iterator[Figure]:
    """What deciding and remembering costs beside computing: 64 sequences of 128 tokens in, 64 out."""
    engine = bench.engine()
    scheduler = engine._scheduler  # noqa: SLF001 - the benchmark looks inside to attribute the time
    spent = [0.0]

    def timed(call: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*args: object) -> object:
            started = time.perf_counter()
            result = call(*args)
            spent[0] += time.perf_counter() - started
            return result

        return wrapper

    for name in ("add", "remove", "schedule", "update", "observe", "take_cache_changes"):
        setattr(scheduler, name, timed(getattr(scheduler, name)))
    specs = [bench.spec(f"s{number}", bench.prompt(128), num_output=64) for number in range(64)]
    seconds = run(engine, specs).seconds
    yield Figure(name="hash, lookup and bookkeeping / step time, percent", value=100 * spent[0] / seconds, at_most=1.0)


def measure_long_prompt(bench: Bench) -> Iterator[Figure]:
    """A prompt of 6,000 tokens comes to 8 decoding streams."""
    prompt = bench.prompt(6000)
    alone = run(bench.engine(), [bench.spec("long", prompt, num_output=1)])
    full_steps = alone.step_seconds[: 6000 // SETTINGS.token_budget]
    streams = [bench.spec(f"s{number}", bench.prompt(100), num_output=40) for number in range(8)]
    names = [spec.sequence_id for spec in streams]
    beside = run(bench.engine(), streams, late=(10, bench.spec("long", prompt, num_output=1)))
    joined = sum(beside.step_seconds[:10])
    gap = beside.largest_gap(names, after=joined)
    yield Figure(
        name="long prompt: largest gap of a stream / a full-budget step", value=gap / max(full_steps), at_most=1.3,
        note=f"{1000 * gap:.0f} ms; full-budget steps alone {1000 * min(full_steps):.0f} to {1000 * max(full_steps):.0f} ms",
    )  # fmt: skip
    first_token = beside.token_times["long"][0] - joined
    yield Figure(
        name="long prompt: its time to first token / alone",
        value=first_token / alone.token_times["long"][0],
        at_most=1.6,
    )


def measure_sampling(bench: Bench, num_requests: int) -> Iterator[Figure]:
    """Throughput with every sampling feature against greedy, in interleaved pairs."""
    prompts = [bench.prompt(32) for _ in range(num_requests)]
    ratios = []
    for _ in range(NUM_PAIRS):
        seconds = []
        for sampling in ({}, FULL_SAMPLING):
            specs = [
                bench.spec(f"{'s' * number}", prompt, num_output=32, **sampling)
                for number, prompt in enumerate(prompts, start=1)
            ]
            seconds.append(run(bench.engine(), specs).seconds)
        ratios.append(seconds[0] / seconds[1])
    yield Figure(
        name=f"full sampling at {num_requests} requests: throughput / greedy", value=statistics.median(ratios),
        at_least=0.9, note=f"min {min(ratios):.3f}, max {max(ratios):.3f} of {NUM_PAIRS} pairs",
    )  # fmt: skip


def measure(bench: Bench) -> Iterator[Figure]:
    """All figures."""
    yield from measure_shared_prefix(bench)
    yield from measure_bookkeeping(bench)
    yield from measure_long_prompt(bench)
    for num_requests in (32, 64):
        yield from measure_sampling(bench, num_requests)


def main() -> int:
    """Prints each figure with its limit; 1 when one is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="model directory")
    parser.add_argument("--threads", type=int, help="threads of the engine; default: what the process may use")
    arguments = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    settings = EngineSettings(
        num_blocks=SETTINGS.num_blocks, token_budget=SETTINGS.token_budget, threads=arguments.threads
    )
    parts = load_parts(arguments.model, settings)
    run(Bench(parts).engine(), [Bench(parts).spec("warm-up", Bench(parts).prompt(600), num_output=4)])
    return report(measure(Bench(parts)))


if __name__ == "__main__":
    sys.exit(main())
