"""Root mean square normalisation (arXiv:1910.07467)."""

import torch


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Rows of `hidden` [T, H] scaled to unit root mean square, times `weight` [H]. The mean is taken in fp32."""
    wide = hidden.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(hidden.dtype)
