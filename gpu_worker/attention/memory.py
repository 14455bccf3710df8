"""Tensors for KV memory."""

import math

import torch

from gpu_worker.kernels import large_pages


def zeros(size: tuple[int, ...], *, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Zeros; on the CPU as a mapping of its own, which takes memory only page by page as blocks are used."""
    num_bytes = math.prod(size) * dtype.itemsize
    if device.type != "cpu" or num_bytes == 0:
        return torch.zeros(size, device=device, dtype=dtype)
    return large_pages.zeros(num_bytes).view(dtype).view(size)
