"""Chooses the attention backend."""

import structlog
import torch

from gpu_worker.attention.cpu import CpuAttention
from gpu_worker.attention.port import AttentionBackend, AttentionShape
from gpu_worker.attention.reference import ReferenceAttention
from gpu_worker.kernels.library import load_cpu_kernels

_log = structlog.get_logger(__name__)


def make_attention(
    shape: AttentionShape, *, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> AttentionBackend:
    """The fastest backend for this device and type, with its KV memory of `kv_dtype`, by default `dtype` too.

    Raises what the allocation raises.
    """
    kept = kv_dtype or dtype
    if device.type == "cuda" and (backend := _make_triton(shape, device, dtype, kept)):
        return backend
    is_for_kernels = device.type == "cpu" and dtype == torch.float32 and kept in (torch.float32, torch.float16)
    kernels = load_cpu_kernels() if is_for_kernels else None
    if kernels is None:
        reason = "the CPU kernels are missing" if is_for_kernels else "not fp32 on a CPU"
        _log.info("attention_backend", name=ReferenceAttention.name, reason=reason)
        return ReferenceAttention(shape, device=device, dtype=kept)
    backend = CpuAttention(shape, kernels, kept)
    _log.info("attention_backend", name=backend.name, reason="fp32 on a CPU, with kernels", kv_dtype=str(kept))
    return backend


def _make_triton(
    shape: AttentionShape, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
) -> AttentionBackend | None:
    """None where Triton is not installed."""
    try:
        # Not at the top: torch brings Triton along only where it is built for CUDA.
        from gpu_worker.attention.triton import TritonAttention  # noqa: PLC0415
    except ImportError as error:
        _log.warning("triton_unavailable", reason=str(error))
        return None
    backend = TritonAttention(shape, device=device, dtype=dtype, kv_dtype=kv_dtype)
    _log.info("attention_backend", name=backend.name, reason="on a CUDA device", kv_dtype=str(kv_dtype))
    return backend
