"""The workloads, the same for every contestant: random prompts, greedy, fixed lengths, all requests at once."""

import argparse
import json
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """So many requests, each of so many tokens in and out."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    vocab_size: int = 49152

    def prompts(self) -> list[tuple[int, ...]]:
        rng = random.Random(0)  # noqa: S311 - token ids, not secrets
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that a contestant's command takes, as the peers' commands do."""
    parser.add_argument("--model", required=True, help="model directory")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)


def workload_of(arguments: argparse.Namespace, *, vocab_size: int) -> Workload:
    return Workload(
        requests=arguments.requests,
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        vocab_size=vocab_size,
    )


def print_result(workload: Workload, *, wall_s: float, **more: float | str) -> None:
    """The line that a contestant's command ends with."""
    rate = workload.total_output_tokens / wall_s
    print(json.dumps({"wall_s": wall_s, "output_tokens_per_s": rate, **more}), flush=True)
