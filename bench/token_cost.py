"""What a token costs each process of the stack, from the engine to the client: `python -m bench.token_cost`.

Streams of the simulated engine at the pace of a small model on two cores, through the whole local stack; processor time, of
which a share is spent whether there are tokens or not. While a model computes, the same code takes longer: the weights pass
through the caches.
"""

import argparse
import asyncio
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

from sluice.client import SluiceClient
from sluice.client_events import Finished, Sampling
from tests.support.stack import MODEL, RunningStack, running_stack

PROMPT_TOKENS = 128
IDLE_S = 5.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def processor_seconds(stack: RunningStack) -> dict[str, float]:
    """By process of the stack, those that it has started included, and of this process, which is the client."""
    spent, parents = {}, {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        parents[int(directory.name)] = int(fields[1])
        spent[int(directory.name)] = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    names = {child.pid: name for name, child in stack.local.services.items()}
    names |= {stack.local.valkey.pid: "valkey", stack.local.postgres.pid: "postgres"}
    by_name: defaultdict[str, float] = defaultdict(float, client=spent[os.getpid()])
    for pid, seconds in spent.items():
        if pid in names:
            by_name[names[pid]] += seconds
        elif (parent := parents[pid]) in names:
            name = names[parent]
            by_name[name if name == "postgres" else f"{name}'s engine"] += seconds
    return dict(by_name)


async def serve(client: SluiceClient, streams: int, tokens: int) -> int:
    """Tokens of all streams, when the last has ended."""

    async def stream(index: int) -> int:
        prompt = tuple(3 + (index * 131 + position) % 200 for position in range(PROMPT_TOKENS))
        sampling = Sampling(max_output_tokens=tokens, temperature=0.0, ignore_eos=True)
        async for event in client.generate(MODEL, prompt, sampling=sampling):
            if isinstance(event, Finished):
                return event.output_tokens
        raise RuntimeError("a stream ended without its end")

    return sum(await asyncio.gather(*(stream(index) for index in range(streams))))


async def measure(stack: RunningStack, streams: int, tokens: int) -> None:
    async with stack.client() as client:
        await serve(client, 2, 2)
        before, started_s = processor_seconds(stack), time.monotonic()
        await asyncio.sleep(IDLE_S)
        idle = spent_since(before, processor_seconds(stack), time.monotonic() - started_s)
        before, started_s = processor_seconds(stack), time.monotonic()
        num_tokens = await serve(client, streams, tokens)
        wall_s = time.monotonic() - started_s
        loaded = spent_since(before, processor_seconds(stack), num_tokens)
    print(f"{num_tokens} tokens of {streams} streams, {num_tokens / wall_s:.0f} tokens/s\n")
    print("| process | µs a token | ms a second, idle |\n|---|---|---|")
    for name in sorted(loaded):
        print(f"| {name} | {loaded[name] * 1e6:.0f} | {idle.get(name, 0.0) * 1e3:.0f} |")
    print(f"| all | {sum(loaded.values()) * 1e6:.0f} | {sum(idle.values()) * 1e3:.0f} |")


def spent_since(before: dict[str, float], after: dict[str, float], divisor: float) -> dict[str, float]:
    return {name: (seconds - before.get(name, 0.0)) / divisor for name, seconds in after.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--tokens-per-s", type=float, default=12.0, help="of each stream")
    arguments = parser.parse_args()
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    with running_stack(tokens_per_s=arguments.tokens_per_s) as stack:
        asyncio.run(measure(stack, arguments.streams, arguments.tokens))
    return 0


if __name__ == "__main__":
    sys.exit(main())
