"""What a CUDA device changes about loading: memory is measured by running the largest step, and steps run ahead."""

from collections.abc import Callable
from typing import Protocol

import structlog
import torch

from gpu_worker.attention.layered import BlockCounts, MakeBackend, make_layered
from gpu_worker.attention.port import AttentionBackend
from gpu_worker.engine.cuda_graphs import CudaGraphs, Graphs
from gpu_worker.engine.model_loading import NATIVE, LoadedModel
from gpu_worker.engine.model_runner import ModelRunner
from gpu_worker.engine.sequence import PlannedSequence, StepPlan
from gpu_worker.engine.settings import EngineSettings

_log = structlog.get_logger(__name__)

_NUM_POOLS = 2
"""Steps that are replayed keep memory of their own, apart from that of the others; each needs no more than the largest."""


class DeviceMemory(Protocol):
    """What a device has left, in bytes."""

    def peak_of(self, call: Callable[[], None]) -> int:
        """The most that `call` holds at a time beyond what was held before; keeps nothing of it."""

    def free_and_total(self) -> tuple[int, int]: ...


class CudaMemory:
    """Implements DeviceMemory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def peak_of(self, call: Callable[[], None]) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        call()
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device) - before
        torch.cuda.empty_cache()
        return int(peak)

    def free_and_total(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self._device)
        return int(free), int(total)


def affordable_blocks(
    memory: DeviceMemory, loaded: LoadedModel, make: MakeBackend, *, settings: EngineSettings, block_bytes: int
) -> int:
    """KV blocks for which there is room beside the weights and the largest step, within the engine's share of the device.

    The largest step spends the token budget on as many sequences as may run, and draws a token for each.
    """
    plan = largest_plan(settings, loaded.context_length)
    blocks = BlockCounts(
        num_blocks=len(plan.sequences[-1].block_table) * len(plan.sequences), block_size=settings.block_size
    )

    def run() -> None:
        ModelRunner(model=loaded.model, attention=make_layered(loaded.layers, blocks, make)).logits(plan)

    peak = memory.peak_of(run)
    free, total = memory.free_and_total()
    budget = free - (1 - settings.device_memory_share) * total - _NUM_POOLS * peak
    num_blocks = max(0, int(budget) // block_bytes)
    _log.info("kv_memory_measured", step_bytes=peak, free_bytes=free, total_bytes=total, num_blocks=num_blocks)
    return num_blocks


def largest_plan(settings: EngineSettings, context_length: int) -> StepPlan:
    """The step that needs the most memory: the whole budget, cut into as many sequences as may run."""
    num_tokens = min(max(1, settings.token_budget // settings.max_running), context_length)
    num_blocks = -(-num_tokens // settings.block_size)
    return StepPlan(
        sequences=tuple(
            PlannedSequence(
                sequence_id=f"largest {number}",
                start=0,
                token_ids=(0,) * num_tokens,
                block_table=tuple(range(number * num_blocks, (number + 1) * num_blocks)),
                is_sampled=True,
            )
            for number in range(settings.max_running)
        )
    )


def make_runner(
    loaded: LoadedModel,
    attention: AttentionBackend,
    *,
    settings: EngineSettings,
    vocab_size: int,
    on_progress: Callable[[], None] = lambda: None,
    graphs: Graphs | None = None,
) -> ModelRunner:
    """The runner that launches steps ahead where Triton attends all layers of a native model; elsewhere the plain one.

    `graphs`: None for those of the device, if it is a CUDA device.
    """
    if graphs is None and loaded.model.device.type == "cuda":
        graphs = CudaGraphs()
    if graphs is None or loaded.code != NATIVE or attention.name != "triton":
        return ModelRunner(model=loaded.model, attention=attention, on_progress=on_progress)
    # Only here: Triton is not installed everywhere.
    from gpu_worker.attention.triton import TritonAttention  # noqa: PLC0415
    from gpu_worker.engine.device_runner import DeviceLimits, DeviceRunner  # noqa: PLC0415

    assert isinstance(attention, TritonAttention)
    limits = DeviceLimits(
        max_rows=max(settings.token_budget, settings.block_size),
        max_running=settings.max_running,
        blocks_per_sequence=-(-loaded.context_length // settings.block_size),
        vocab_size=vocab_size,
    )
    runner = DeviceRunner(
        model=loaded.model, attention=attention, limits=limits, graphs=graphs, on_progress=on_progress
    )
    runner.record_graphs()
    return runner
