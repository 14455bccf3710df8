"""Chooses the matrix product of a model: the packed one where it works, else torch's own."""

from typing import Any

import structlog
import torch

from gpu_worker.layers.linear.check import find_fault
from gpu_worker.layers.linear.onednn import OneDnnLinear, OneDnnUnavailableError, find_operators
from gpu_worker.layers.linear.plain import PlainLinear
from gpu_worker.layers.linear.port import Linear

_log = structlog.get_logger(__name__)


class LinearFactory:
    """Implements MakeLinear; one per model that is loaded. Checks the first weight of each shape, logs each reason once."""

    def __init__(self, *, namespace: Any = torch.ops.mkldnn) -> None:
        """`namespace` holds oneDNN's operators."""
        self._namespace = namespace
        self._checked_shapes: set[tuple[int, int, bool]] = set()
        self._reasons: set[str] = set()

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """One family for every batch size; a linear that is not batch-invariant says so."""
        if weight.device.type != "cpu":
            return PlainLinear(weight, bias)
        try:
            return self._pack(weight, bias)
        except OneDnnUnavailableError as unavailable:
            self._log_once(str(unavailable))
            return PlainLinear(weight, bias)

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        packed = OneDnnLinear(find_operators(self._namespace), weight, bias)
        shape = (*weight.shape, bias is not None)
        if shape not in self._checked_shapes:
            fault = find_fault(packed, weight, bias)
            if fault is not None:
                raise OneDnnUnavailableError(f"[{weight.shape[0]}, {weight.shape[1]}]: {fault}")
            self._checked_shapes.add(shape)
        return packed

    def _log_once(self, reason: str) -> None:
        if reason not in self._reasons:
            self._reasons.add(reason)
            _log.warning("linear_not_packed", reason=reason)
