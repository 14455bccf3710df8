"""What a decode step cannot be faster than here: `python -m bench.engine.bound --model DIR`. Prints one JSON line.

Every product of the step by the fastest one that is at hand, and the keys and values of all requests at the bandwidth of
memory. Measured with real weights, layer by layer, so that a product finds its weights where a step finds them.
"""

import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch

from bench.engine.workload import make_parser, serve
from gpu_worker.engine.host_resources import available_threads
from gpu_worker.layers.linear.factory import LinearFactory
from gpu_worker.layers.linear.onednn import OneDnnLinear, OneDnnUnavailableError, find_operators
from gpu_worker.layers.linear.plain import PlainLinear
from gpu_worker.layers.linear.port import Linear
from gpu_worker.models.config import ModelConfig, read_model_config
from gpu_worker.models.llama import LlamaModel
from service_kit.model_manifest import read_manifest

_REPEATS = 9
_STREAM_BYTES = 512 << 20


class _Ways:
    """A product by the linear that the engine uses, and by others that are at hand for fp32 numbers."""

    def __init__(self, factory: LinearFactory, weight: torch.Tensor, scale: torch.Tensor | None) -> None:
        own = factory(weight, None, scale)
        self.linears: dict[str, Linear] = {own.name: own}
        if scale is None:
            self.linears["plain"] = PlainLinear(weight.clone(), None)
            with contextlib.suppress(OneDnnUnavailableError):
                self.linears["onednn"] = OneDnnLinear(find_operators(torch.ops.mkldnn), weight, None)
        self.num_inputs = weight.shape[1]


class Products:
    """All products of a step of one model."""

    def __init__(self, directory: Path, config: ModelConfig, num_rows: int) -> None:
        self._made: list[_Ways] = []
        factory = LinearFactory()

        def collect(weight: torch.Tensor, _bias: torch.Tensor | None, scale: torch.Tensor | None = None) -> _Ways:
            self._made.append(_Ways(factory, weight, scale))
            return self._made[-1]

        make_linear: Any = collect
        device = torch.device("cpu")
        LlamaModel.load(directory, config, device=device, dtype=torch.float32, make_linear=make_linear)
        self._rows = {ways.num_inputs: torch.randn(num_rows, ways.num_inputs) for ways in self._made}

    def ms(self) -> dict[str, float]:
        """By each way that is at hand."""
        with torch.inference_mode():
            return {name: median_ms(partial(self._multiply, name)) for name in self._made[0].linears}

    def _multiply(self, name: str) -> None:
        for ways in self._made:
            ways.linears[name](self._rows[ways.num_inputs])


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
