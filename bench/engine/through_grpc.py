"""The engine behind the whole local stack, on the same cores: `python -m bench.engine.through_grpc --model DIR`.

Postgres, Valkey, a gateway, a scheduler and a worker as processes; every request is a stream of the Python client. Prints
one JSON line. Through gRPC a prompt is prefix-cached, so the warm-up has prompts of its own.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from bench.engine.workload import Workload, add_arguments, print_result, workload_of
from service_kit.model_manifest import read_manifest
from sluice.client import SluiceClient
from sluice.client_events import Finished, Sampling
from tests.support.stack import running_stack


async def run(client: SluiceClient, model: str, workload: Workload) -> float:
    """Seconds until the last stream has ended."""

    async def stream(prompt: tuple[int, ...]) -> int:
        sampling = Sampling(max_output_tokens=workload.output_tokens, temperature=0.0, ignore_eos=True)
        async for event in client.generate(model, prompt, sampling=sampling):
            if isinstance(event, Finished):
                return event.output_tokens
        raise RuntimeError("a stream ended without its end")

    started = time.perf_counter()
    counts = await asyncio.gather(*(stream(prompt) for prompt in workload.prompts()))
    seconds = time.perf_counter() - started
    if sum(counts) != workload.total_output_tokens:
        raise RuntimeError(f"{sum(counts)} tokens instead of {workload.total_output_tokens}")
    return seconds


async def measure(client: SluiceClient, model: str, workload: Workload) -> float:
    async with client:
        # Other prompts than the workload's: it draws from a smaller vocabulary.
        await run(client, model, replace(workload, output_tokens=4, vocab_size=workload.vocab_size // 2))
        return await run(client, model, workload)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--kv-dtype", default="float32")
    arguments = parser.parse_args()
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    directory = Path(arguments.model).absolute()
    manifest = read_manifest(directory)
    workload = workload_of(arguments, vocab_size=manifest.vocab_size)
    settings = {"kv_dtype": arguments.kv_dtype, "max_running": max(64, arguments.requests)}
    with running_stack(native_model=directory, engine_settings=settings) as stack:
        seconds = asyncio.run(measure(stack.client(), manifest.model, workload))
    print_result(workload, wall_s=seconds, settings=json.dumps(settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
