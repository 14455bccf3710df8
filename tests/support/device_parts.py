"""Engines as on a CUDA device, on the CPU: interpreted kernels, and graphs whose bodies are called again."""

import dataclasses
from pathlib import Path

import torch

from gpu_worker.engine.cuda_graphs import CalledGraphs
from gpu_worker.engine.device_loading import make_runner
from gpu_worker.engine.loading import EngineParts, load_parts
from gpu_worker.engine.model_loading import load_model
from gpu_worker.engine.settings import EngineSettings


def load_rehearsed(directory: Path, settings: EngineSettings) -> tuple[EngineParts, EngineParts, CalledGraphs]:
    """Parts over the plain runner, the same over the device's, and its graphs."""
    from gpu_worker.attention.triton import TritonAttention  # noqa: PLC0415 - not there everywhere

    plain = load_parts(directory, settings)
    cpu, fp32 = torch.device("cpu"), torch.float32
    loaded = load_model(directory, plain.manifest, device=cpu, dtype=fp32)
    shape = plain.runner._attention.shape
    attention = TritonAttention(shape, device=cpu, dtype=fp32, kv_dtype=fp32)
    graphs = CalledGraphs()
    vocab_size = plain.manifest.vocab_size
    runner = make_runner(loaded, attention, settings=settings, vocab_size=vocab_size, graphs=graphs)
    return plain, dataclasses.replace(plain, runner=runner, speculation=None), graphs
