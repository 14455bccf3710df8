"""What is measured: tokens per second, how busy the device is, and a step beside the replay of its graph alone."""

import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from bench.engine.workload import Workload
from gpu_worker.engine.device_draws import DrawKind
from gpu_worker.engine.device_runner import DeviceRunner
from gpu_worker.engine.engine import NativeEngine
from gpu_worker.engine.loading import EngineParts, make_engine
from gpu_worker.engine.port import SequenceSpec
from gpu_worker.engine.settings import EngineSettings
from service_kit.sampling import SamplingParams

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Of one number of requests, all at once. Steps are those in which every request decoded."""

    requests: int
    tokens_per_s: float
    decode_tokens_per_s: float
    step_ms: float
    replay_ms: float
    busy_share: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def measure(parts: EngineParts, settings: EngineSettings, workload: Workload, *, num_repeats: int) -> Measurement:
    """Warm, then timed, then `num_repeats` steps once more under the profiler, which slows things down, and replays."""
    specs = _specs(workload)
    _run(make_engine(parts, settings), specs)
    seconds, step_s = _run(make_engine(parts, settings), specs)
    step = statistics.median(step_s)
    return Measurement(
        requests=workload.requests,
        tokens_per_s=workload.total_output_tokens / seconds,
        decode_tokens_per_s=workload.requests / step,
        step_ms=1000 * step,
        replay_ms=1000 * _replay_seconds(parts, workload.requests, num_repeats),
        busy_share=_busy_share(make_engine(parts, settings), specs, num_repeats),
    )


def _specs(workload: Workload) -> list[SequenceSpec]:
    sampling = SamplingParams(max_output_tokens=workload.output_tokens, temperature=0.0, ignore_eos=True, seed=0)
    return [
        SequenceSpec(
            sequence_id=str(number),
            prompt_token_ids=prompt,
            output_token_ids=(),
            sampling=sampling,
            priority=1,
            nonce=0,
            prefix_salt=str(number),
        )
        for number, prompt in enumerate(workload.prompts())
    ]


def _step(engine: NativeEngine) -> int:
    return sum(len(output.delta.token_ids) for output in engine.step().outputs if output.delta is not None)


def _run(engine: NativeEngine, specs: list[SequenceSpec]) -> tuple[float, list[float]]:
    """Seconds to the end, and those of the steps in which all decoded."""
    started = last = time.perf_counter()
    for spec in specs:
        engine.add(spec)
    num_tokens, steps = 0, []
    while engine.has_work():
        num_new = _step(engine)
        now = time.perf_counter()
        if num_new == len(specs):
            steps.append(now - last)
        last = now
        num_tokens += num_new
    wanted = sum(spec.sampling.max_output_tokens for spec in specs)
    if num_tokens != wanted:
        raise RuntimeError(f"{num_tokens} tokens instead of {wanted}")
    return last - started, steps


def _replay_seconds(parts: EngineParts, num_rows: int, repeats: int) -> float:
    """Of a decode of so many rows and its greedy draw, back to back, as the device alone can do them."""
    runner = parts.runner
    if not isinstance(runner, DeviceRunner):
        raise TypeError("nothing is recorded: the model is not served by our kernels on this device")
    runner.replay(num_rows, DrawKind.GREEDY)
    _synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        runner.replay(num_rows, DrawKind.GREEDY)
    _synchronize()
    return (time.perf_counter() - started) / repeats


def _busy_share(engine: NativeEngine, specs: list[SequenceSpec], num_steps: int) -> float:
    """The share of the time of some decode steps in which the device ran something."""
    for spec in specs:
        engine.add(spec)
    while engine.has_work() and _step(engine) < len(specs):
        pass
    # Where it runs, not what the machine has: a dry run is one on the CPU.
    is_cuda = engine.capabilities().details["device"].startswith("cuda")
    _synchronize()
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as profiler:
        started = time.perf_counter()
        for _ in range(num_steps):
            _step(engine)
        wall = time.perf_counter() - started
        _synchronize()
    wanted = torch.autograd.DeviceType.CUDA if is_cuda else torch.autograd.DeviceType.CPU
    busy = union_seconds(
        (event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profiler.events()
        if event.device_type == wanted
    )
    return min(1.0, busy / wall)


def union_seconds(intervals: Iterable[Interval]) -> float:
    """Seconds that at least one of the intervals covers."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def table(measurements: Iterable[Measurement]) -> str:
    """For people."""
    lines = [f"{'requests':>8} {'tokens/s':>10} {'decode/s':>10} {'step ms':>9} {'replay ms':>10} {'busy':>6}"]
    lines += [
        f"{each.requests:>8} {each.tokens_per_s:>10.1f} {each.decode_tokens_per_s:>10.1f} {each.step_ms:>9.3f}"
        f" {each.replay_ms:>10.3f} {each.busy_share:>6.1%}"
        for each in measurements
    ]
    return "\n".join(lines)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
