"""Tensors for KV memory."""

import math
import mmap

import torch


def zeros(size: tuple[int, ...], *, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Zeros; on the CPU as an anonymous mapping, which takes memory only page by page as blocks are used."""
    num_bytes = math.prod(size) * dtype.itemsize
    if device.type != "cpu" or num_bytes == 0:
        return torch.zeros(size, device=device, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(size)
