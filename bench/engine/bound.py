"""What a decode step cannot be faster than here: `python -m bench.engine.bound --model DIR`. Prints one JSON line.

Every product of the step by the fastest one that is at hand, and the keys and values of all requests at the bandwidth of
memory. Measured with real weights, layer by layer, so that a product finds its weights where a step finds them.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import structlog
import torch
from torch.nn.functional import linear as torch_linear

from bench.engine.workload import add_arguments
from gpu_worker.engine.host_resources import available_threads
from gpu_worker.layers.linear.factory import LinearFactory
from gpu_worker.models.config import ModelConfig, read_model_config
from gpu_worker.models.llama import LlamaModel
from service_kit.model_manifest import read_manifest

_REPEATS = 9
_STREAM_BYTES = 512 << 20


class _Both:
    """A product by the linear that the engine uses, and by torch's own on the fp32 numbers."""

    def __init__(self, factory: LinearFactory, weight: torch.Tensor, scale: torch.Tensor | None) -> None:
        self.packed = factory(weight, None, scale)
        self.plain = weight.clone() if scale is None else None
        self.num_inputs = weight.shape[1]


def products_ms(directory: Path, config: ModelConfig, num_rows: int) -> dict[str, float]:
    """Of all products of a step, by each way that is at hand."""
    made: list[_Both] = []
    factory = LinearFactory()

    def collect(weight: torch.Tensor, _bias: torch.Tensor | None, scale: torch.Tensor | None = None) -> _Both:
        made.append(_Both(factory, weight, scale))
        return made[-1]

    LlamaModel.load(directory, config, device=torch.device("cpu"), dtype=torch.float32, make_linear=collect)  # type: ignore[arg-type]
    rows = {both.num_inputs: torch.randn(num_rows, both.num_inputs) for both in made}

    def packed() -> None:
        for both in made:
            both.packed(rows[both.num_inputs])

    def plain() -> None:
        for both in made:
            assert both.plain is not None
            torch_linear(rows[both.num_inputs], both.plain)

    ways: dict[str, Callable[[], None]] = {made[0].packed.name: packed}
    if made[0].plain is not None:
        ways["torch"] = plain
    with torch.inference_mode():
        return {name: median_ms(way) for name, way in ways.items()}


def read_gb_per_s() -> float:
    """How fast memory is read by all threads together."""
    numbers = torch.ones(_STREAM_BYTES // 4)
    return _STREAM_BYTES / 1e6 / median_ms(numbers.sum)


def median_ms(call: Callable[[], object]) -> float:
    call()
    taken = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        call()
        taken.append(1000 * (time.perf_counter() - started))
    return statistics.median(taken)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--kv-dtype", default="float32")
    arguments = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    torch.set_num_threads(available_threads())
    directory = Path(arguments.model)
    config = replace(read_model_config(directory), is_int8=read_manifest(directory).precision == "int8")
    ways = products_ms(directory, config, arguments.requests)
    bandwidth = read_gb_per_s()
    context = arguments.prompt_tokens + arguments.output_tokens // 2
    kv_bytes = config.kv_bytes_per_token(getattr(torch, arguments.kv_dtype).itemsize) * context * arguments.requests
    kv_ms = kv_bytes / 1e6 / bandwidth
    result = {"bound_ms": min(ways.values()) + kv_ms, "kv_ms": kv_ms, "read_gb_per_s": bandwidth, "products_ms": ways}
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
