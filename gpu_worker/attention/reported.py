"""Tells of every layer of a step as it is reached, whatever computes it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gpu_worker.attention.port import StepAttention
from gpu_worker.kernels.layer import AddressedStep


def reported(step: StepAttention, report: Callable[[], None]) -> StepAttention:
    """`step`, calling `report` before each layer; an AddressedStep stays one."""
    if isinstance(step, AddressedStep):
        return _ReportedAddresses(inner=step, addressed=step, report=report)
    return _Reported(inner=step, report=report)


@dataclass(frozen=True, kw_only=True)
class _Reported:
    """Implements StepAttention."""

    inner: StepAttention
    report: Callable[[], None]

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.report()
        return self.inner(layer, query, key, value)


@dataclass(frozen=True, kw_only=True)
class _ReportedAddresses(_Reported, AddressedStep):
    """Is an AddressedStep too."""

    addressed: AddressedStep

    def addresses(self, layer: int) -> tuple[int, int]:
        self.report()
        return self.addressed.addresses(layer)
