"""The workloads, the same for every contestant: random prompts, greedy, fixed lengths, all requests at once.

Imported by peers in virtual environments of their own, so it needs the standard library only.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """So many requests, each of so many tokens in and out."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    vocab_size: int = 49152

    def prompts(self, seed: int = 0) -> list[tuple[int, ...]]:
        rng = random.Random(seed)  # noqa: S311 - token ids, not secrets
        return [
            tuple(rng.randrange(5, self.vocab_size - 100) for _ in range(self.prompt_tokens))
            for _ in range(self.requests)
        ]

    @property
    def total_output_tokens(self) -> int:
        return self.requests * self.output_tokens


WORKLOADS = {
    "32": Workload(requests=32, prompt_tokens=128, output_tokens=128),
    "64": Workload(requests=64, prompt_tokens=128, output_tokens=128),
    "one": Workload(requests=1, prompt_tokens=32, output_tokens=64),
    "prompt": Workload(requests=1, prompt_tokens=1024, output_tokens=1),
    "naive": Workload(requests=1, prompt_tokens=128, output_tokens=128),
}
"""By name. "prompt" is the time to first token; "naive" is one request after the other."""


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """With the options that every contestant's command takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True, help="directory or file of the model")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--waits", action="store_true", help="run once for each line that is read, instead of once")
    return parser


def workload_of(arguments: argparse.Namespace, *, vocab_size: int = 49152) -> Workload:
    return Workload(
        requests=arguments.requests,
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        vocab_size=vocab_size,
    )


def serve(arguments: argparse.Namespace, run: Callable[[], Mapping[str, object]]) -> None:
    """Measures as often as it is asked to, and prints a line of JSON for each time. What is asked for one after the other
    runs in one process: loading and compiling are over by then, for every contestant.
    """
    if not arguments.waits:
        print(json.dumps(run()), flush=True)
        return
    print(json.dumps({"is_ready": True}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(run()), flush=True)


def timed(workload: Workload, run: Callable[[], int]) -> dict[str, float]:
    """The result of one run, which returns the number of tokens it made. Raises RuntimeError for a wrong number."""
    started = time.perf_counter()
    num_tokens = run()
    wall_s = time.perf_counter() - started
    if num_tokens != workload.total_output_tokens:
        raise RuntimeError(f"{num_tokens} tokens instead of {workload.total_output_tokens}")
    return {"wall_s": wall_s, "output_tokens_per_s": num_tokens / wall_s}
