"""The engine alone, in one process: `python -m bench.engine.alone --model DIR`. Prints one JSON line."""

import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import structlog

from bench.engine.workload import Workload, make_parser, serve, workload_of
from gpu_worker.engine.engine import NativeEngine
from gpu_worker.engine.loading import load_parts, make_engine
from gpu_worker.engine.port import SequenceSpec
from gpu_worker.engine.settings import EngineSettings
from service_kit.sampling import SamplingParams

_WARM_UP_TOKENS = 4


def run(engine: NativeEngine, workload: Workload) -> tuple[float, list[float]]:
    """Seconds to the end, and those of the steps in which every request decoded."""
    sampling = SamplingParams(max_output_tokens=workload.output_tokens, temperature=0.0, ignore_eos=True, seed=0)
    specs = [
        SequenceSpec(
            sequence_id=str(number),
            prompt_token_ids=prompt,
            output_token_ids=(),
            sampling=sampling,
            priority=1,
            nonce=0,
        )
        for number, prompt in enumerate(workload.prompts())
    ]
    started = time.perf_counter()
    for spec in specs:
        engine.add(spec)
    num_tokens, decode_steps, is_decoding = 0, [], False
    while engine.has_work():
        step_started = time.perf_counter()
        output = engine.step()
        deltas = [each.delta for each in output.outputs if each.delta is not None]
        if is_decoding and len(deltas) == workload.requests:
            decode_steps.append(time.perf_counter() - step_started)
        is_decoding = len(deltas) == workload.requests
        num_tokens += sum(len(delta.token_ids) for delta in deltas)
    seconds = time.perf_counter() - started
    if num_tokens != workload.total_output_tokens:
        raise RuntimeError(f"{num_tokens} tokens instead of {workload.total_output_tokens}")
    return seconds, decode_steps


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--kv-dtype", default="float32")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    tokens_each = arguments.prompt_tokens + arguments.output_tokens
    # As the peers do it: room for everything, whatever a step takes, one token a step, and no cached prefixes.
    settings = EngineSettings(
        threads=arguments.threads,
        kv_dtype=arguments.kv_dtype,
        max_running=max(64, arguments.requests),
        num_blocks=max(512, arguments.requests * (-(-tokens_each // 16) + 1) + 64),
        target_step_ms=None,
        speculation="off",
    )
    parts = load_parts(Path(arguments.model), settings)
    workload = workload_of(arguments, vocab_size=parts.capabilities.vocab_size)
    run(make_engine(parts, settings), replace(workload, output_tokens=min(_WARM_UP_TOKENS, workload.output_tokens)))

    def measure() -> dict[str, object]:
        seconds, decode_steps = run(make_engine(parts, settings), workload)
        return {
            "wall_s": seconds,
            "output_tokens_per_s": workload.total_output_tokens / seconds,
            "step_ms": 1000 * statistics.median(decode_steps) if decode_steps else 0.0,
            "threads": parts.capabilities.details["threads"],
        }

    serve(arguments, measure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
