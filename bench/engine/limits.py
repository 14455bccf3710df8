"""What the engine has to reach, as figures with limits. Pure."""

import statistics
from collections.abc import Iterator, Sequence

from bench.engine.rounds import Samples, best_of, ratios, series
from bench.figures import Figure

LLAMA_TYPES = ("llama.cpp Q4_0", "llama.cpp Q8_0")
LLAMA_PROMPT_TYPES = ("llama.cpp F16", *LLAMA_TYPES)
PRECISIONS = ("fp32", "int8")

_AGAINST_VLLM = {("fp32", "32"): 1.4, ("fp32", "64"): 1.2, ("int8", "32"): 2.0, ("int8", "64"): 1.9}
_INT8_AGAINST_LLAMA = {"32": 1.5, "64": 1.6}
_ONE_AGAINST_Q8 = 0.6
_PROMPT_AGAINST_LLAMA = {"fp32": 1.1, "int8": 0.75}
_STEP_AGAINST_BOUND = 1.35
_GRPC_AGAINST_ALONE = 0.8
_AGAINST_NAIVE = {"fp32": 8.0, "int8": 16.0}
_SERVICE_TOKENS_PER_S = 50_000.0
_SERVICE_GROWTH_MB = 8.0
_PERPLEXITY = 1.01


def figures(samples: Samples) -> Iterator[Figure]:
    """Those whose both sides were measured."""
    for (precision, workload), limit in _AGAINST_VLLM.items():
        ours = _rates(samples, f"alone {precision}", workload)
        yield from _figure(
            f"{precision}, {workload} / vLLM", ratios(ours, _rates(samples, "vLLM", workload)), least=limit
        )
    for workload, limit in _INT8_AGAINST_LLAMA.items():
        theirs = best_of([_rates(samples, name, workload) for name in LLAMA_TYPES])
        pairs = ratios(_rates(samples, "alone int8", workload), theirs)
        yield from _figure(f"int8, {workload} / llama.cpp's best type", pairs, least=limit)
    pairs = ratios(_rates(samples, "alone int8", "one"), _rates(samples, "llama.cpp Q8_0", "one"))
    yield from _figure("int8, one request / llama.cpp Q8_0", pairs, least=_ONE_AGAINST_Q8)
    fastest = best_of([_rates(samples, name, "prompt") for name in LLAMA_PROMPT_TYPES])
    for precision, limit in _PROMPT_AGAINST_LLAMA.items():
        pairs = ratios(fastest, _rates(samples, f"alone {precision}", "prompt"))
        yield from _figure(f"{precision}, time to first token of 1,024 / llama.cpp's best", pairs, most=limit)
    yield from _own_figures(samples)


def _own_figures(samples: Samples) -> Iterator[Figure]:
    for precision in PRECISIONS:
        alone = f"alone {precision}"
        for workload in ("32", "64"):
            steps = series(samples, alone, workload, "step_ms")
            pairs = ratios(steps, series(samples, f"bound {precision}", workload, "bound_ms"))
            yield from _figure(f"{precision}, {workload}: step / bound", pairs, most=_STEP_AGAINST_BOUND)
        pairs = ratios(_rates(samples, f"through gRPC {precision}", "32"), _rates(samples, alone, "32"))
        yield from _figure(f"{precision}, 32: through gRPC / alone", pairs, least=_GRPC_AGAINST_ALONE)
        pairs = ratios(_rates(samples, alone, "64"), _rates(samples, "transformers", "naive"))
        name = f"{precision}, 64 at once / transformers, one after the other"
        yield from _figure(name, pairs, least=_AGAINST_NAIVE[precision])


def service_figures(result: dict[str, float]) -> Iterator[Figure]:
    """Of the service process with the simulated engine."""
    name = "service process, 256 streams with text"
    note = f"CPU: service {result['service_cpu']:.2f}, engine {result['engine_cpu']:.2f}"
    yield Figure(name=f"{name}: tokens/s", value=result["tokens_per_s"], at_least=_SERVICE_TOKENS_PER_S, note=note)
    note = f"of {result['memory_mb']:.0f} MB, engine process included"
    yield Figure(name=f"{name}: growth, MB", value=result["growth_mb"], at_most=_SERVICE_GROWTH_MB, note=note)


def quality_figures(fp32: float, int8: float, *, kv_dtype: str) -> Iterator[Figure]:
    """Of the perplexities; int8 with the KV type that it is measured with."""
    note = f"{int8:.3f} with {kv_dtype} KV, {fp32:.3f}"
    yield Figure(name="int8: perplexity / fp32", value=int8 / fp32, at_most=_PERPLEXITY, note=note)


def _rates(samples: Samples, name: str, workload: str) -> list[float]:
    return series(samples, name, workload, "output_tokens_per_s")


def _figure(
    name: str, pairs: Sequence[float], *, least: float | None = None, most: float | None = None
) -> Iterator[Figure]:
    if pairs:
        note = f"{min(pairs):.2f} to {max(pairs):.2f}"
        yield Figure(name=name, value=statistics.median(pairs), at_least=least, at_most=most, note=note)
