"""On the CPU the logits of a position are the same bits however it was executed, and so are the drawn tokens.

Every sequence first runs alone, in whole prompts. Then random schedules run the same sequences: in batches, cut into
chunks, behind shared prefixes, thrown out of memory and brought back from the host tier, ended after n tokens and resumed
by another engine, with another number of threads, and beside neighbours that nobody knows.
"""

import itertools
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch

from gpu_worker.engine.engine import NativeEngine
from gpu_worker.engine.loading import EngineParts, load_parts, make_engine
from gpu_worker.engine.port import SequenceSpec
from gpu_worker.engine.settings import EngineSettings
from gpu_worker.layers.linear.factory import LinearFactory
from gpu_worker.layers.linear.port import Linear
from gpu_worker.layers.linear.unfused import UnfusedLinear
from gpu_worker.models import llama
from tests.support.engine_runs import Result, collect, make_spec, run_to_end
from tests.support.recording import RecordedLogits, record_logits
from tests.support.tiny_models import encode, make_tiny_model, quantize_tiny

NUM_OUTPUT = 14
SHARED = encode("A prefix that several sequences have in common, longer than some blocks of memory. ")
PROMPTS = tuple(
    encode(text) if not is_shared else SHARED + encode(text)
    for text, is_shared in (
        ("one", True),
        ("two, and a longer rest of its own that goes on", True),
        ("", True),
        ("x", False),
        ("Pack my box with five dozen liquor jugs", False),
        ("0123456789 abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ 0123456789 abcdefghijklmnopq", False),
    )
)
SAMPLINGS = (
    {},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "seed": 6, "repetition_penalty": 1.3, "logprobs": 2},
    {"temperature": 0.7, "min_p": 0.02, "seed": 7, "presence_penalty": 0.5, "frequency_penalty": 0.5},
)
"""Of request number n: SAMPLINGS[n % 4]."""
INT8 = "llama, int8 weights, fp16 KV"
MODELS = {
    "llama": (4, {}),
    "mistral": (16, {"sliding_window": 37}),
    "qwen3": (8, {"head_dim": 24, "num_key_value_heads": 1}),
    INT8: (8, {"tie_word_embeddings": True}),
}
"""Block size and config fields of each."""

NUM_SCHEDULES = 200
SCHEDULES_PER_TEST = 20


@dataclass(kw_only=True)
class Model:
    """A loaded model, what it computes from now on, and what its sequences gave when each ran alone."""

    parts: EngineParts
    settings: EngineSettings
    recorded: RecordedLogits
    plain_logits: dict[tuple[int, int], torch.Tensor]
    plain_tokens: dict[int, tuple[int, ...]]

    def engine(self, **fields: object) -> NativeEngine:
        settings = replace(self.settings, **fields)
        capabilities = replace(self.parts.capabilities, num_blocks=settings.num_blocks)
        return make_engine(replace(self.parts, capabilities=capabilities), settings)


@dataclass(kw_only=True)
class Seen:
    """What the schedules made happen, so that a comparison of nothing is noticed."""

    num_compared: int = 0
    num_resumed: int = 0
    num_preempted: int = 0
    num_cached_tokens: int = 0
    num_blocks_from_host: int = 0

    def add(self, engine: NativeEngine) -> None:
        load = engine.load_report()
        self.num_preempted += load.num_preempted
        self.num_cached_tokens += load.num_cached_prompt_tokens
        self.num_blocks_from_host += load.num_blocks_from_host


def spec_of(number: int, *, name: str | None = None, **fields: object) -> SequenceSpec:
    sampling = SAMPLINGS[number % len(SAMPLINGS)]
    return make_spec(name or str(number), PROMPTS[number], max_output_tokens=NUM_OUTPUT, **sampling, **fields)


@cache
def load_model(model_type: str) -> Model:
    block_size, fields = MODELS[model_type]
    is_int8 = model_type == INT8
    settings = EngineSettings(
        threads=1,
        num_blocks=160,
        num_host_blocks=64,
        block_size=block_size,
        kv_dtype="float16" if is_int8 else None,
    )
    with tempfile.TemporaryDirectory() as root:
        directory = Path(root) / "model"
        make_tiny_model(directory, "llama" if is_int8 else model_type, context_length=160, **fields)
        parts = load_parts(quantize_tiny(directory) if is_int8 else directory, settings)
    assert parts.capabilities.is_batch_invariant
    model = Model(parts=parts, settings=settings, recorded=record_logits(parts), plain_logits={}, plain_tokens={})
    for number in range(len(PROMPTS)):
        engine = model.engine()
        model.plain_tokens[number] = run_to_end(engine, [spec_of(number)])[str(number)].token_ids
        assert engine.load_report().num_cached_prompt_tokens == 0
    model.plain_logits = {(int(name), length): logits for (name, length), logits in model.recorded.items()}
    assert len(model.plain_logits) == len(PROMPTS) * NUM_OUTPUT
    return model


class Schedule:
    """One random way to run some of the sequences, made from a seed."""

    def __init__(self, model: Model, seed: int) -> None:
        self._random = random.Random(seed)
        self._model = model
        numbers = self._random.sample(range(len(PROMPTS)), self._random.randint(2, len(PROMPTS)))
        self._arrivals = [(self._random.randrange(20), self._spec(number)) for number in numbers]
        self._arrivals += [(self._random.randrange(20), self._neighbour(number)) for number in range(3)]
        self._cuts = {
            str(number): self._random.randint(1, NUM_OUTPUT - 1) for number in numbers if self._random.random() < 0.3
        }
        self._outputs: dict[int, tuple[int, ...]] = {}

    def run(self, seen: Seen) -> dict[int, tuple[int, ...]]:
        """Output tokens by request; its logits are then in the model's record."""
        torch.set_num_threads(self._random.randint(1, 3))
        engine = self._engine()
        self._run(engine, self._arrivals)
        seen.add(engine)
        rest = [
            (self._random.randrange(5), self._spec(number, output=tokens))
            for number, tokens in self._outputs.items()
            if len(tokens) < NUM_OUTPUT
        ]
        seen.num_resumed += len(rest)
        if self._random.random() < 0.5:
            engine = self._engine()
        self._run(engine, rest)
        seen.add(engine)
        return self._outputs

    def _run(self, engine: NativeEngine, arrivals: list[tuple[int, SequenceSpec]]) -> None:
        results: dict[str, Result] = {}
        pending = sorted(arrivals, key=lambda arrival: arrival[0])
        for step in itertools.count():
            while pending and pending[0][0] <= step:
                engine.add(pending.pop(0)[1])
            if not pending and not engine.has_work():
                break
            assert step < 2000, "a schedule must come to its end"
            collect(results, engine.step())
            engine.check_integrity()
            for name, num_tokens in self._cuts.items():
                if name in results and len(results[name].token_ids) >= num_tokens:
                    engine.abort(name)
        for name, result in results.items():
            assert result.finish.failure is None, result.finish
            if name[0] != "n":
                number = int(name.split("#")[0])
                self._outputs[number] = self._outputs.get(number, ()) + result.token_ids

    def _engine(self) -> NativeEngine:
        block_size = self._model.settings.block_size
        longest = max(len(prompt) for prompt in PROMPTS) + NUM_OUTPUT
        num_blocks = -(-longest // block_size) + self._random.choice((0, 2, 8, 100 // block_size))
        max_running = self._random.randint(1, 8)
        return self._model.engine(
            num_blocks=num_blocks,
            num_host_blocks=self._random.choice((0, 4, 64)),
            max_running=max_running,
            token_budget=max_running + self._random.choice((0, 3, 17, 200)),
            long_prefill_tokens=self._random.choice((1, 5, 16, 100)),
            max_long_prefills=self._random.randint(1, 3),
        )

    def _spec(self, number: int, *, output: tuple[int, ...] = ()) -> SequenceSpec:
        return spec_of(
            number,
            name=f"{number}#{len(output)}" if output else None,
            output=output,
            priority=self._random.randrange(3),
        )

    def _neighbour(self, number: int) -> SequenceSpec:
        """A sequence with a seed that no other run has; half of them begin with the shared prefix."""
        own = tuple(self._random.randrange(256) for _ in range(self._random.randint(1, 40)))
        return make_spec(
            f"n{number}",
            SHARED + own if self._random.random() < 0.5 else own,
            max_output_tokens=self._random.randint(1, NUM_OUTPUT),
            temperature=1.0,
            seed=self._random.getrandbits(60),
            priority=self._random.randrange(3),
        )


def differences(model: Model, seeds: range, seen: Seen) -> Iterator[str]:
    """What the schedules gave otherwise than the plain runs."""
    for seed in seeds:
        model.recorded.clear()
        outputs = Schedule(model, seed).run(seen)
        for number, tokens in outputs.items():
            if tokens != model.plain_tokens[number]:
                yield f"schedule {seed}: other tokens for request {number}"
        for (name, length), logits in model.recorded.items():
            if name[0] != "n":
                seen.num_compared += 1
                if not torch.equal(logits, model.plain_logits[int(name.split("#")[0]), length]):
                    yield f"schedule {seed}: other logits for request {name} at {length} tokens"


@pytest.mark.parametrize("first_seed", range(0, NUM_SCHEDULES, SCHEDULES_PER_TEST))
def test_every_schedule_gives_the_same_bits(first_seed):
    model_type = list(MODELS)[first_seed // SCHEDULES_PER_TEST % len(MODELS)]
    seen = Seen()
    found = list(differences(load_model(model_type), range(first_seed, first_seed + SCHEDULES_PER_TEST), seen))
    assert not found
    assert seen.num_compared > SCHEDULES_PER_TEST * NUM_OUTPUT
    assert min(seen.num_resumed, seen.num_preempted, seen.num_cached_tokens, seen.num_blocks_from_host) > 0, seen


class SwitchingLinear(UnfusedLinear):
    """What must not be: another matrix product, which sums in another order, where there are many rows."""

    name = "switching"
    is_batch_invariant = True  # it claims so

    def __init__(self, packed: Linear, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        assert bias is None
        self._packed = packed
        self._weight = weight.clone()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._packed(rows) if len(rows) < 8 else (rows[:, None] * self._weight).sum(-1)


def test_another_product_for_large_batches_is_noticed(monkeypatch):
    packed = LinearFactory()
    monkeypatch.setattr(
        llama,
        "LinearFactory",
        lambda: lambda weight, bias=None, _=None: SwitchingLinear(packed(weight, bias), weight, bias),
    )
    model = load_model.__wrapped__("llama")
    found = list(differences(model, range(3), Seen()))
    assert any("other logits" in difference for difference in found)
