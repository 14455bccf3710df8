"""What a step costs the engine beside computing it: plan, requests, numbers, text, load report and frame.

Run: python -m bench.step_overhead [MODEL_DIR]

Over an executor that computes nothing; processor time. Between the products of a real model the same code takes several times
as long, because the weights have passed through the caches meanwhile.
"""

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import process_time

from gpu_worker.engine.engine import NativeEngine
from gpu_worker.engine.execution import Sampled, SampleFailure, SampleRequest
from gpu_worker.engine.frames import OutputFrame, encode_frame
from gpu_worker.engine.port import Capabilities, SequenceSpec
from gpu_worker.engine.sequence import BlockMoves, StepPlan
from gpu_worker.engine.step_limits import StepLimits
from gpu_worker.engine.text import TokenTable
from service_kit.garbage import forget_startup_objects
from service_kit.sampling import SamplingParams

DEFAULT_MODEL = Path(".sluice/models/smollm2-135m-instruct")
VOCAB_SIZE = 49_152
PROMPT_TOKENS = 128
STEPS = 600
BATCHES = (1, 8, 32, 64)


class NoModel:
    """Implements Executor: draws as fast as it can."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._num_runs = 0

    def move(self, moves: BlockMoves) -> None:
        assert not moves, "there is no host tier"

    def run(self, plan: StepPlan, requests: Sequence[SampleRequest]) -> list[Sampled | SampleFailure]:
        del plan
        started = process_time()
        self._num_runs += 1
        drawn = [Sampled(token_id=1000 + (7 * self._num_runs + 31 * row) % 40_000) for row in range(len(requests))]
        self.spent_s += process_time() - started
        return list(drawn)

    def forget(self, sequence_id: str) -> None:
        """Nothing is remembered."""


def make_engine(executor: NoModel, table: TokenTable, *, num_sequences: int) -> NativeEngine:
    """With so many sequences that decode."""
    capabilities = Capabilities(
        engine="native",
        model="none",
        model_revision="0",
        precision="fp32",
        context_length=2048,
        vocab_size=VOCAB_SIZE,
        num_blocks=16_384,
        block_size=16,
        max_running=max(BATCHES),
    )
    limits = StepLimits(
        max_running=max(BATCHES), token_budget=512, max_long_prefills=2, long_prefill_tokens=256, target_step_s=0.5
    )
    engine = NativeEngine(executor=executor, capabilities=capabilities, limits=limits, table=table, eos_token_ids=(2,))
    sampling = SamplingParams(max_output_tokens=1500, temperature=0.0, seed=1, ignore_eos=True)
    for number in range(num_sequences):
        prompt = tuple(random.randrange(VOCAB_SIZE) for _ in range(PROMPT_TOKENS))  # noqa: S311 - only has to differ
        spec = SequenceSpec(
            sequence_id=f"{number:036}/1",
            prompt_token_ids=prompt,
            output_token_ids=(),
            sampling=sampling,
            priority=1,
            nonce=0,
            prefix_salt="tenant",
        )
        engine.add(spec)
    while len(engine.step().outputs) < num_sequences:
        pass
    return engine


def measure(table: TokenTable, *, num_sequences: int) -> float:
    """Microseconds of a step."""
    executor = NoModel()
    engine = make_engine(executor, table, num_sequences=num_sequences)
    taken: list[float] = []
    for _ in range(STEPS):
        executor.spent_s, started = 0.0, process_time()
        output = engine.step()
        encode_frame(OutputFrame(output=output, load=engine.load_report(), num_pauses=0))
        taken.append(process_time() - started - executor.spent_s)
    return 1e6 * median(taken)


def main() -> None:
    random.seed(7)
    table = TokenTable.from_directory(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_MODEL)
    forget_startup_objects()
    for num_sequences in BATCHES:
        print(f"{num_sequences:>3} sequences {measure(table, num_sequences=num_sequences):9.0f} us a step")


if __name__ == "__main__":
    main()
