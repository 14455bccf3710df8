"""What a decode step cannot be faster than here: `python -m bench.engine.bound --model DIR`. Prints one JSON line.

Every product of the step by the fastest one that is at hand, and the keys and values of all requests at the bandwidth of
memory. Measured with real weights, layer by layer, so that a product finds its weights where a step finds them.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
import torch
from torch.nn.functional import linear as torch_linear

from bench.engine.workload import make_parser, serve
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


class Products:
    """All products of a step of one model."""

    def __init__(self, directory: Path, config: ModelConfig, num_rows: int) -> None:
        self._made: list[_Both] = []
        factory = LinearFactory()

        def collect(weight: torch.Tensor, _bias: torch.Tensor | None, scale: torch.Tensor | None = None) -> _Both:
            self._made.append(_Both(factory, weight, scale))
            return self._made[-1]

        make_linear: Any = collect
        device = torch.device("cpu")
        LlamaModel.load(directory, config, device=device, dtype=torch.float32, make_linear=make_linear)
        self._rows = {both.num_inputs: torch.randn(num_rows, both.num_inputs) for both in self._made}

    def ms(self) -> dict[str, float]:
        """By each way that is at hand."""
        first = self._made[0]
        ways: dict[str, Callable[[], None]] = {first.packed.name: self._packed}
        if first.plain is not None:
            ways["torch"] = self._plain
        with torch.inference_mode():
            return {name: median_ms(way) for name, way in ways.items()}

    def _packed(self) -> None:
        for both in self._made:
            both.packed(self._rows[both.num_inputs])

    def _plain(self) -> None:
        for both in self._made:
            assert both.plain is not None
            torch_linear(self._rows[both.num_inputs], both.plain)


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
    parser = make_parser(__doc__)
    parser.add_argument("--kv-dtype", default="float32")
    arguments = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    torch.set_num_threads(available_threads())
    directory = Path(arguments.model)
    config = replace(read_model_config(directory), is_int8=read_manifest(directory).precision == "int8")
    products = Products(directory, config, arguments.requests)
    # Half of the output is there on average.
    context = arguments.prompt_tokens + arguments.output_tokens // 2
    kv_bytes = config.kv_bytes_per_token(getattr(torch, arguments.kv_dtype).itemsize) * context * arguments.requests

    def measure() -> dict[str, object]:
        ways, bandwidth = products.ms(), read_gb_per_s()
        kv_ms = kv_bytes / 1e6 / bandwidth
        return {
            "bound_ms": min(ways.values()) + kv_ms,
            "kv_ms": kv_ms,
            "read_gb_per_s": bandwidth,
            "products_ms": ways,
        }

    serve(arguments, measure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
