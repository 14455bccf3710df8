"""Builds a native engine and what it runs on: threads, weights, KV memory, and a first forward."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gpu_worker.attention.factory import make_attention
from gpu_worker.attention.layered import BlockCounts, LayerGeometry, MakeBackend, make_layered
from gpu_worker.attention.port import AttentionBackend, AttentionShape
from gpu_worker.engine.device_loading import CudaMemory, affordable_blocks, make_runner
from gpu_worker.engine.engine import NativeEngine
from gpu_worker.engine.host_resources import available_memory_bytes, available_threads
from gpu_worker.engine.model_loading import LoadedModel, load_model
from gpu_worker.engine.model_runner import ModelRunner
from gpu_worker.engine.port import Capabilities, NoteUntried, note_nothing
from gpu_worker.engine.sequence import PlannedSequence, StepPlan
from gpu_worker.engine.settings import INT8_PRECISION, PRECISION_BY_DTYPE, EngineSettings, EngineStartError
from gpu_worker.engine.text import TokenTable
from gpu_worker.speculation.loading import load_speculation
from gpu_worker.speculation.port import Speculation
from service_kit.model_manifest import ModelManifest, read_manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """Everything about one loaded model."""

    manifest: ModelManifest
    capabilities: Capabilities
    runner: ModelRunner
    table: TokenTable
    known_steps: tuple[tuple[StepPlan, float], ...] = ()
    """Plans that have been run, and their seconds."""
    speculation: Speculation | None = None


def load_native_engine(
    directory: Path,
    *,
    settings: EngineSettings,
    clock: Callable[[], float] = time.time,
    note_untried: NoteUntried = note_nothing,
    on_progress: Callable[[], None] = lambda: None,
) -> NativeEngine:
    """The engine for the model in `directory`, warmed up. Raises ModelFilesError, EngineStartError."""
    parts = load_parts(directory, settings, on_progress=on_progress)
    return make_engine(parts, settings, clock=clock, note_untried=note_untried)


def make_engine(
    parts: EngineParts,
    settings: EngineSettings,
    *,
    clock: Callable[[], float] = time.time,
    note_untried: NoteUntried = note_nothing,
) -> NativeEngine:
    """An engine with nothing in it over loaded parts."""
    return NativeEngine(
        executor=parts.runner,
        capabilities=parts.capabilities,
        limits=settings.step_limits(),
        table=parts.table,
        eos_token_ids=parts.manifest.eos_token_ids,
        num_host_blocks=settings.num_host_blocks,
        clock=clock,
        note_untried=note_untried,
        known_steps=parts.known_steps,
        drafts=parts.speculation.drafts() if parts.speculation is not None else None,
    )


def load_parts(
    directory: Path, settings: EngineSettings, *, on_progress: Callable[[], None] = lambda: None
) -> EngineParts:
    """Loads and warms up. Raises ModelFilesError for the files, EngineStartError for settings and memory."""
    manifest = read_manifest(directory)
    precision = _precision(manifest, settings)
    device, dtype, kv_dtype = _device(settings), _dtype(settings.dtype), _dtype(settings.kv_dtype or settings.dtype)
    if device.type == "cpu":
        torch.set_num_threads(settings.threads or available_threads())
    table = TokenTable.from_directory(directory)
    loaded = load_model(directory, manifest, device=device, dtype=dtype)
    context_length = loaded.context_length

    def make_backend(shape: AttentionShape) -> AttentionBackend:
        return make_attention(shape, device=device, dtype=dtype, kv_dtype=kv_dtype)

    num_blocks = _num_blocks(settings, loaded, make_backend)
    blocks = BlockCounts(
        num_blocks=num_blocks, block_size=settings.block_size, num_host_blocks=settings.num_host_blocks
    )
    attention = _allocate_kv_memory(loaded.layers, blocks, make_backend)
    runner = make_runner(loaded, attention, settings=settings, vocab_size=manifest.vocab_size, on_progress=on_progress)
    warm_up = _warm_up(runner, min(settings.block_size, settings.token_budget, context_length))
    capabilities = Capabilities(
        engine="native",
        model=manifest.model,
        model_revision=manifest.revision,
        precision=precision,
        context_length=context_length,
        vocab_size=manifest.vocab_size,
        num_blocks=num_blocks,
        block_size=settings.block_size,
        max_running=settings.max_running,
        is_batch_invariant=loaded.model.is_batch_invariant and attention.is_batch_invariant,
        kv_dtype=settings.kv_dtype or settings.dtype,
        details={
            "model_code": loaded.code,
            "device": str(device),
            "threads": str(torch.get_num_threads()),
            "attention": attention.name,
        },
    )
    speculation = load_speculation(
        settings.drafting(),
        executor=runner,
        capabilities=capabilities,
        table=table,
        load_draft=lambda: _load_draft(settings, on_progress),
    )
    return EngineParts(
        manifest=manifest,
        capabilities=capabilities,
        runner=runner,
        table=table,
        known_steps=(warm_up,),
        speculation=speculation,
    )


def _load_draft(
    settings: EngineSettings, on_progress: Callable[[], None]
) -> tuple[ModelRunner, Capabilities, TokenTable]:
    assert settings.draft_model is not None, "the settings were checked"
    own = replace(
        settings,
        num_blocks=None,
        num_host_blocks=0,
        memory_share=settings.draft_memory_share,
        # Of a device, what the first model left.
        device_memory_share=min(1.0, settings.device_memory_share + settings.draft_memory_share),
        speculation="off",
        draft_model=None,
    )
    parts = load_parts(Path(settings.draft_model), own, on_progress=on_progress)
    return parts.runner, parts.capabilities, parts.table


def _precision(manifest: ModelManifest, settings: EngineSettings) -> str:
    """Part of the model's key: that of the files if they are quantized, else the type that they are computed in."""
    if manifest.precision != INT8_PRECISION:
        return PRECISION_BY_DTYPE[settings.dtype]
    if settings.dtype != "float32":
        raise EngineStartError(f"dtype {settings.dtype!r}: a model of precision {INT8_PRECISION} needs float32")
    return INT8_PRECISION


def _device(settings: EngineSettings) -> torch.device:
    try:
        device = torch.device(settings.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise EngineStartError(f"device {settings.device!r} cannot be used: {error}") from error
    return device


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), "settings admit only names of types"
    return dtype


def _num_blocks(settings: EngineSettings, loaded: LoadedModel, make_backend: MakeBackend) -> int:
    """Blocks of the pool. Raises EngineStartError unless one sequence of full length fits."""
    context_length = loaded.context_length
    blocks_per_sequence = -(-context_length // settings.block_size)
    num_blocks = settings.num_blocks
    if num_blocks is None:
        block_bytes = settings.block_size * loaded.kv_bytes_per_token(
            _dtype(settings.kv_dtype or settings.dtype).itemsize
        )
        device = loaded.model.device
        if device.type == "cuda":
            affordable = affordable_blocks(
                CudaMemory(device), loaded, make_backend, settings=settings, block_bytes=block_bytes
            )
        else:
            affordable = int(available_memory_bytes() * settings.memory_share) // block_bytes
        num_blocks = min(affordable, settings.max_running * blocks_per_sequence)
    if num_blocks < blocks_per_sequence:
        raise EngineStartError(
            f"one sequence of {context_length} tokens needs {blocks_per_sequence} KV blocks, "
            f"there is memory for {num_blocks}"
        )
    return num_blocks


def _allocate_kv_memory(layers: Sequence[LayerGeometry], blocks: BlockCounts, make: MakeBackend) -> AttentionBackend:
    try:
        return make_layered(layers, blocks, make)
    except (OSError, MemoryError, RuntimeError) as error:
        raise EngineStartError(f"KV memory of {blocks.num_blocks} blocks cannot be allocated: {error}") from error


def _warm_up(runner: ModelRunner, num_tokens: int) -> tuple[StepPlan, float]:
    """Two small forwards: the first pays for lazy initialisation, the second tells what such a step costs."""
    warm_up = PlannedSequence(
        sequence_id="warm-up", start=0, token_ids=(0,) * num_tokens, block_table=(0,), is_sampled=True
    )
    plan = StepPlan(sequences=(warm_up,))
    runner.logits(plan)
    started = time.perf_counter()
    runner.logits(plan)
    return plan, time.perf_counter() - started
