"""Chooses the attention backend."""

import structlog
import torch

from gpu_worker.attention.cpu import CpuAttention
from gpu_worker.attention.port import AttentionBackend, AttentionShape
from gpu_worker.attention.reference import ReferenceAttention
from gpu_worker.kernels.library import load_cpu_kernels

_log = structlog.get_logger(__name__)


def make_attention(shape: AttentionShape, *, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """The fastest backend for this device and type, with its KV memory. Raises what the allocation raises."""
    kernels = load_cpu_kernels() if device.type == "cpu" and dtype == torch.float32 else None
    backend: AttentionBackend
    if kernels is None:
        reason = (
            "the CPU kernels are missing" if device.type == "cpu" and dtype == torch.float32 else "not fp32 on a CPU"
        )
        _log.info("attention_backend", name=ReferenceAttention.name, reason=reason)
        return ReferenceAttention(shape, device=device, dtype=dtype)
    backend = CpuAttention(shape, kernels)
    _log.info("attention_backend", name=backend.name, reason="fp32 on a CPU, with kernels")
    return backend
