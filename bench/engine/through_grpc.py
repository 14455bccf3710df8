"""The engine behind the whole local stack, on the same cores: `python -m bench.engine.through_grpc --model DIR`.

Postgres, Valkey, a gateway, a scheduler and a worker as processes; every request is a stream of the Python client. Prints
one JSON line. Through gRPC a prompt is prefix-cached, so every run has prompts of its own.
"""

import asyncio
import itertools
import os
import sys
from dataclasses import replace
from pathlib import Path

from bench.engine.workload import Workload, make_parser, serve, timed, workload_of
from service_kit.model_manifest import read_manifest
from sluice.client import SluiceClient
from sluice.client_events import Finished, Sampling
from tests.support.stack import RunningStack, running_stack


async def run(client: SluiceClient, model: str, workload: Workload, seed: int) -> int:
    """Tokens of all streams, when the last has ended."""

    async def stream(prompt: tuple[int, ...]) -> int:
        sampling = Sampling(max_output_tokens=workload.output_tokens, temperature=0.0, ignore_eos=True)
        async for event in client.generate(model, prompt, sampling=sampling):
            if isinstance(event, Finished):
                return event.output_tokens
        raise RuntimeError("a stream ended without its end")

    return sum(await asyncio.gather(*(stream(prompt) for prompt in workload.prompts(seed))))


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--kv-dtype", default="float32")
    arguments = parser.parse_args()
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    directory = Path(arguments.model).absolute()
    manifest = read_manifest(directory)
    workload = workload_of(arguments, vocab_size=manifest.vocab_size)
    settings = {
        "kv_dtype": arguments.kv_dtype,
        "max_running": max(64, arguments.requests),
        "speculation": "off",
        "target_step_ms": None,
    }
    seeds = itertools.count()
    with running_stack(native_model=directory, engine_settings=settings) as stack, asyncio.Runner() as runner:
        client = runner.run(_open(stack))
        try:
            warm_up = replace(workload, output_tokens=min(4, workload.output_tokens))
            runner.run(run(client, manifest.model, warm_up, next(seeds)))
            serve(
                arguments,
                lambda: timed(workload, lambda: runner.run(run(client, manifest.model, workload, next(seeds)))),
            )
        finally:
            runner.run(client.__aexit__(None, None, None))
    return 0


async def _open(stack: RunningStack) -> SluiceClient:
    return await stack.client().__aenter__()


if __name__ == "__main__":
    sys.exit(main())
