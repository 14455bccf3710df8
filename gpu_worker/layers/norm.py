"""Root mean square normalisation (arXiv:1910.07467)."""

import torch

from gpu_worker.kernels.library import kernels_for


def rms_norm(
    hidden: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows of `hidden` [T, H] or [T, heads, H] scaled to unit root mean square, times `weight` [H]; the mean in fp32.

    Written to `out`, which may be `hidden` itself, or to a new tensor.
    """
    if kernels := kernels_for(hidden, weight):
        out = torch.empty_like(hidden, memory_format=torch.contiguous_format) if out is None else out
        kernels.rms_norm(hidden, weight, eps, out)
        return out
    wide = hidden.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normalised = weight * wide.to(hidden.dtype)
    return normalised if out is None else out.copy_(normalised)
