"""What speculation gains and costs on the small real model: `python -m bench.speculation` (or `make bench-speculation`).

A plain engine and one that speculates take turns step by step over the same requests, in one process and each over a model
of its own, so that the machine's speed does not count. Their outputs have to be equal. With one thread the processor's time
is taken, otherwise the wall's.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog
from tokenizers import Tokenizer

from bench.figures import Figure, report
from gpu_worker.artifacts.texts import EVALUATION
from gpu_worker.engine.engine import NativeEngine
from gpu_worker.engine.loading import load_parts, make_engine
from gpu_worker.engine.port import SequenceSpec
from gpu_worker.engine.settings import EngineSettings
from service_kit.sampling import SamplingParams

MODELS = Path(".sluice/models")
FP32, INT8 = MODELS / "smollm2-135m-instruct", MODELS / "smollm2-135m-instruct-int8"
DIRECTORY_BY_PRECISION = {"int8": INT8, "fp32": FP32}
NUM_BLOCKS = 1600
MANY = 32


@dataclass(kw_only=True)
class Side:
    """One of the two engines, and what it did."""

    engine: NativeEngine
    seconds: float = 0.0
    num_decode_steps: int = 0
    num_decoded: int = 0
    tokens: dict[str, list[int]] = field(default_factory=dict)

    def step(self, clock: Callable[[], float]) -> None:
        started = clock()
        output = self.engine.step()
        self.seconds += clock() - started
        is_decoding = bool(self.tokens)
        for each in output.outputs:
            if each.finish is not None and each.finish.failure is not None:
                raise RuntimeError(f"{each.sequence_id}: {each.finish.failure}")
            if each.delta is not None:
                self.tokens.setdefault(each.sequence_id, []).extend(each.delta.token_ids)
                self.num_decoded += is_decoding * len(each.delta.token_ids)
                self.num_decode_steps += is_decoding


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """gain: time of the plain engine over that of the other. tokens_per_step: of a sequence that decodes."""

    gain: float
    tokens_per_step: float
    accepted: float


class Bench:
    """Two copies of a model, and texts in its tokens."""

    def __init__(self, directory: Path, settings: EngineSettings) -> None:
        self.name = "int8" if directory.name.endswith("int8") else "fp32"
        self._settings = settings
        self._plain = load_parts(directory, replace(settings, speculation="off", draft_model=None))
        self._speculating = load_parts(directory, settings)
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._text: list[int] = tokenizer.encode(EVALUATION.read()).ids
        # Once for what is made at the first use.
        self.compare([self.copying(0)], num_output=8, temperature=0.0)

    def copying(self, number: int) -> tuple[int, ...]:
        """A passage, and its beginning once more: the model goes on copying it."""
        passage = self._text[number * 37 : number * 37 + 160]
        return (*passage, *passage[:40])

    def prose(self, number: int) -> tuple[int, ...]:
        return tuple(self._text[number * 61 : number * 61 + 120])

    def noise(self, number: int) -> tuple[int, ...]:
        """Tokens without any order."""
        return tuple(1000 + (number * 7919 + place * 104_729) % 40_000 for place in range(120))

    def compare(self, prompts: list[tuple[int, ...]], *, num_output: int, temperature: float) -> Comparison:
        """Raises RuntimeError when the outputs differ."""
        plain, speculating = (
            Side(engine=make_engine(parts, self._settings)) for parts in (self._plain, self._speculating)
        )
        for number, prompt in enumerate(prompts):
            for side in (plain, speculating):
                side.engine.add(_spec(str(number), prompt, num_output=num_output, temperature=temperature))
        clock = time.thread_time if self._settings.threads == 1 else time.perf_counter
        while plain.engine.has_work() or speculating.engine.has_work():
            for side in (plain, speculating):
                if side.engine.has_work():
                    side.step(clock)
        if plain.tokens != speculating.tokens:
            raise RuntimeError("the outputs differ")
        load = speculating.engine.load_report()
        return Comparison(
            gain=plain.seconds / speculating.seconds,
            tokens_per_step=speculating.num_decoded / max(1, speculating.num_decode_steps),
            accepted=load.num_accepted_draft_tokens / max(1, load.num_draft_tokens),
        )


def _spec(name: str, prompt: tuple[int, ...], *, num_output: int, temperature: float) -> SequenceSpec:
    sampling = SamplingParams(max_output_tokens=num_output, ignore_eos=True, temperature=temperature, seed=len(prompt))
    return SequenceSpec(
        sequence_id=name, prompt_token_ids=prompt, output_token_ids=(), sampling=sampling, priority=1, nonce=0
    )


def measure_one(bench: Bench) -> Iterator[Figure]:
    """One request at a time."""
    for way, temperature in (("greedy", 0.0), ("seeded", 0.5)):
        found = bench.compare([bench.copying(1)], num_output=80, temperature=temperature)
        name = f"{bench.name}, 1 request, copying, {way}"
        limits = {"at_least": 1.8} if way == "greedy" else {}
        yield Figure(name=f"{name}: tokens per step", value=found.tokens_per_step, **limits)
        limits = {"at_least": 1.4} if way == "greedy" else {}
        yield Figure(name=f"{name}: time of plain / its own", value=found.gain, note=_note(found), **limits)
    for way, prompt in (("prose", bench.prose(1)), ("noise", bench.noise(1))):
        found = bench.compare([prompt], num_output=80, temperature=0.8)
        yield Figure(
            name=f"{bench.name}, 1 request, {way}, seeded: time of plain / its own", value=found.gain, at_least=0.97,
            note=_note(found),
        )  # fmt: skip


def measure_many(bench: Bench) -> Iterator[Figure]:
    """Many at once, where further rows are no longer cheap."""
    for way, prompt_of, temperature in (
        ("copying, greedy", bench.copying, 0.0),
        ("prose, seeded", bench.prose, 0.8),
        ("noise, seeded", bench.noise, 0.8),
    ):
        found = bench.compare([prompt_of(number) for number in range(MANY)], num_output=40, temperature=temperature)
        yield Figure(
            name=f"{bench.name}, {MANY} requests, {way}: time of plain / its own", value=found.gain, at_least=0.97,
            note=_note(found),
        )  # fmt: skip


def measure_draft_model(settings: EngineSettings) -> Iterator[Figure]:
    """The quantized model proposes for the one that it was made of."""
    bench = Bench(FP32, replace(settings, speculation="draft", draft_model=str(INT8), max_draft_tokens=5))
    for way, number, num_output in (("1 request", 1, 256), ("1 short request", 1, 48), (f"{MANY} requests", MANY, 48)):
        found = bench.compare([bench.prose(i) for i in range(number)], num_output=num_output, temperature=0.8)
        yield Figure(
            name=f"fp32 with its int8 as draft model, {way}, prose: time of plain / its own", value=found.gain,
            at_least=0.97, note=f"{found.tokens_per_step:.2f} tokens per step, {_note(found)}",
        )  # fmt: skip


def _note(found: Comparison) -> str:
    return f"{100 * found.accepted:.0f} % of proposed tokens accepted"


def measure(settings: EngineSettings, groups: list[str], models: list[str]) -> Iterator[Figure]:
    """The figures of the chosen groups."""
    for directory in (DIRECTORY_BY_PRECISION[name] for name in models):
        if {"one", "many"} & set(groups):
            bench = Bench(directory, settings)
            yield from measure_one(bench) if "one" in groups else ()
            yield from measure_many(bench) if "many" in groups else ()
    if "draft" in groups:
        yield from measure_draft_model(settings)


def main() -> int:
    """Prints each figure with its limit; 1 when one is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = ["one", "many", "draft"]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="groups of figures")
    precisions = list(DIRECTORY_BY_PRECISION)
    parser.add_argument("--models", nargs="+", choices=precisions, default=precisions, help="of the first two groups")
    parser.add_argument("--threads", type=int, help="threads of the engine; default: what the process may use")
    arguments = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    settings = EngineSettings(num_blocks=NUM_BLOCKS, threads=arguments.threads)
    return report(measure(settings, arguments.only, arguments.models))


if __name__ == "__main__":
    sys.exit(main())
