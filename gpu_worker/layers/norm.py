"""Root mean square normalisation (arXiv:1910.07467)."""

from dataclasses import dataclass

import torch

from gpu_worker.kernels.library import kernels_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """The weight [H] of a norm and what is added to the mean square."""

    weight: torch.Tensor
    eps: float


def add_rms_norm(hidden: torch.Tensor, delta: torch.Tensor | None, norm: Norm) -> torch.Tensor:
    """Adds `delta` [T, H], if there is one, to `hidden` in place; its normalised rows as a new tensor."""
    if delta is None:
        return rms_norm(hidden, norm.weight, norm.eps)
    if kernels := kernels_for(hidden, delta, norm.weight):
        out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        kernels.add_rms_norm(hidden, delta, norm.weight, norm.eps, out)
        return out
    return rms_norm(hidden.add_(delta), norm.weight, norm.eps)


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
