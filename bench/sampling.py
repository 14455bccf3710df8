"""What sampling costs beside a step, with numpy and with the compiled kernels: ms per call, measured in turns in one process.

python bench/sampling.py [--threads 2] [--vocab-size 49152] [--repeats 30] [--step-ms 80] [--cpu-time]

--cpu-time counts the time of the processor instead of that of the clock: for one thread on a machine that others use.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gpu_worker.engine.execution import SampleRequest
from gpu_worker.engine.plain_rows import PlainRows
from gpu_worker.engine.row_sampler import RowSampler, make_row_sampler
from gpu_worker.engine.sampler import Sampler
from gpu_worker.kernels.library import load_cpu_kernels
from service_kit.sampling import SamplingParams

_NUM_PROMPT = 128
_NUM_OUTPUT = 128
_NUM_ROWS = (1, 32, 64)
_GREEDY = "greedy"
_ROW_SAMPLERS: dict[str, Callable[[torch.Tensor], RowSampler]] = {"numpy": PlainRows, "kernels": make_row_sampler}
_FIELDS_BY_NAME: dict[str, dict[str, float | int]] = {
    _GREEDY: {"temperature": 0},
    "temperature alone": {"temperature": 0.8},
    "top-k 50": {"temperature": 0.8, "top_k": 50},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "T 1, top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "min-p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "greedy, 5 logprobs": {"temperature": 0, "logprobs": 5},
    "penalties, greedy": {
        "temperature": 0,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
    },
    "full set": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
    },
    "full set, 5 logprobs": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "logprobs": 5,
    },
}


@dataclass(kw_only=True)
class Case:
    """One set of parameters for a number of rows, with sequences that grow by a token at each call."""

    sampler: Sampler
    requests: list[SampleRequest]

    def run(self, logits: torch.Tensor, clock: Callable[[], float]) -> float:
        """Milliseconds of one call."""
        started = clock()
        outcomes = self.sampler.sample(logits, self.requests)
        elapsed = clock() - started
        for request, outcome in zip(self.requests, outcomes, strict=True):
            request.token_ids.append(outcome.token_id)
        return elapsed * 1000


def make_case(fields: dict[str, float | int], sampler: Sampler, *, num_rows: int, vocab_size: int) -> Case:
    """Sequences of random tokens."""
    generator = torch.Generator().manual_seed(num_rows)
    length = _NUM_PROMPT + _NUM_OUTPUT
    contexts = torch.randint(vocab_size, (num_rows, length), generator=generator).tolist()
    requests = [
        SampleRequest(
            sequence_id=str(row),
            sampling=SamplingParams(max_output_tokens=4096, seed=row, **fields),
            position=_NUM_OUTPUT + 1,
            token_ids=contexts[row],
            num_prompt_tokens=_NUM_PROMPT,
        )
        for row in range(num_rows)
    ]
    return Case(sampler=sampler, requests=requests)


def make_logits(num_rows: int, vocab_size: int) -> torch.Tensor:
    """Zipf-like, as a language model's: the i-th most probable token has about probability 1 / i, in random places."""
    generator = torch.Generator().manual_seed(num_rows)
    ranks = torch.stack([torch.randperm(vocab_size, generator=generator) for _ in range(num_rows)]) + 1
    return -1.3 * ranks.double().log().float() + 0.5 * torch.randn(num_rows, vocab_size, generator=generator)


def measure(
    num_rows: int, *, vocab_size: int, repeats: int, clock: Callable[[], float]
) -> dict[tuple[str, str], float]:
    """Median milliseconds by name of the parameters and of the row sampler."""
    cases = {
        (name, kind): make_case(fields, Sampler(make_rows), num_rows=num_rows, vocab_size=vocab_size)
        for name, fields in _FIELDS_BY_NAME.items()
        for kind, make_rows in _ROW_SAMPLERS.items()
    }
    times: dict[tuple[str, str], list[float]] = {key: [] for key in cases}
    # The model has just written the logits when they are sampled; several tensors, so that they are not all in a cache.
    logits = [make_logits(num_rows, vocab_size) for _ in range(3)]
    for repeat in range(repeats + 2):
        for key, case in cases.items():
            elapsed = case.run(logits[repeat % len(logits)].clone(), clock)
            if repeat >= 2:  # noqa: PLR2004  (the first two warm up)
                times[key].append(elapsed)
    return {key: statistics.median(values) for key, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--step-ms", type=float, default=80.0)
    parser.add_argument("--cpu-time", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    if load_cpu_kernels() is None:
        print("no compiled kernels: both columns are numpy")
    print(f"{arguments.threads} threads, vocabulary {arguments.vocab_size}, medians of {arguments.repeats}, ms")
    print(
        f"{'':>28}{'numpy':>8}{'over greedy':>13}{'kernels':>12}{'over greedy':>13}{f'of {arguments.step_ms:g} ms':>12}"
    )
    for num_rows in _NUM_ROWS:
        medians = measure(num_rows, vocab_size=arguments.vocab_size, repeats=arguments.repeats, clock=clock)
        for name in _FIELDS_BY_NAME:
            plain, fused = medians[name, "numpy"], medians[name, "kernels"]
            over_plain, over = plain - medians[_GREEDY, "numpy"], fused - medians[_GREEDY, "kernels"]
            share = over / arguments.step_ms
            print(f"{num_rows:>4}  {name:<22}{plain:>8.2f}{over_plain:>13.2f}{fused:>12.2f}{over:>13.2f}{share:>12.1%}")


if __name__ == "__main__":
    main()
