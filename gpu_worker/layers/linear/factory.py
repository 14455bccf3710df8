"""Chooses the matrix product of a model: our own where it works, else oneDNN's, else torch's plain one."""

from collections.abc import Callable
from typing import Any

import structlog
import torch

from gpu_worker.kernels.fp32 import Fp32Kernels
from gpu_worker.kernels.int8 import Int8Kernels
from gpu_worker.kernels.library import CpuKernels, load_cpu_kernels
from gpu_worker.layers.linear.check import FP32_TOLERANCE, INT8_TOLERANCE, find_fault
from gpu_worker.layers.linear.fp32 import Fp32Linear, Fp32UnavailableError
from gpu_worker.layers.linear.int8 import Int8Linear, Int8UnavailableError
from gpu_worker.layers.linear.onednn import OneDnnLinear, OneDnnUnavailableError, find_operators
from gpu_worker.layers.linear.plain import PlainLinear
from gpu_worker.layers.linear.port import Linear

_log = structlog.get_logger(__name__)


class LinearFactory:
    """Implements MakeLinear; one per model that is loaded. Checks the first weight of each shape, logs each reason once."""

    def __init__(
        self,
        *,
        namespace: Any = torch.ops.mkldnn,
        load_kernels: Callable[[], CpuKernels | None] = load_cpu_kernels,
    ) -> None:
        """`namespace` holds oneDNN's operators; the kernels are loaded when a weight comes."""
        self._namespace = namespace
        self._load_kernels = load_kernels
        self._int8_kernels: Int8Kernels | None = None
        self._fp32_kernels: Fp32Kernels | None = None
        self._checked: set[tuple[str, torch.Size, bool]] = set()
        self._reasons: set[tuple[str, str]] = set()

    def __call__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, scale: torch.Tensor | None = None
    ) -> Linear:
        """One family for every batch size; a linear that is not batch-invariant says so.

        An int8 weight whose product is missing here is multiplied as the fp32 numbers that it stands for.
        """
        if scale is not None:
            try:
                return self._pack_int8(weight, scale, bias)
            except Int8UnavailableError as unavailable:
                self._log_once("linear_not_int8", str(unavailable))
                weight = weight * scale[:, None]
        if weight.device.type != "cpu":
            return PlainLinear(weight, bias)
        try:
            return self._pack_fp32(weight, bias)
        except Fp32UnavailableError as unavailable:
            self._log_once("linear_not_ours", str(unavailable))
        try:
            return self._pack_onednn(weight, bias)
        except OneDnnUnavailableError as unavailable:
            self._log_once("linear_not_packed", str(unavailable))
        return PlainLinear(weight, bias)

    def _pack_fp32(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        if self._fp32_kernels is None and (kernels := self._load_kernels()):
            self._fp32_kernels = Fp32Kernels(kernels)
        packed = Fp32Linear(self._fp32_kernels, weight, bias)
        fault = self._find_fault(packed, weight, bias, tolerance=FP32_TOLERANCE)
        if fault is not None:
            raise Fp32UnavailableError(fault)
        return packed

    def _pack_onednn(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        packed = OneDnnLinear(find_operators(self._namespace), weight, bias)
        fault = self._find_fault(packed, weight, bias, tolerance=FP32_TOLERANCE)
        if fault is not None:
            raise OneDnnUnavailableError(fault)
        return packed

    def _pack_int8(self, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        if self._int8_kernels is None and (kernels := self._load_kernels()):
            self._int8_kernels = Int8Kernels(kernels)
        packed = Int8Linear(self._int8_kernels, weight, scale, bias)
        fault = self._find_fault(packed, weight * scale[:, None], bias, tolerance=INT8_TOLERANCE)
        if fault is not None:
            raise Int8UnavailableError(fault)
        return packed

    def _find_fault(
        self, linear: Linear, weight: torch.Tensor, bias: torch.Tensor | None, *, tolerance: float
    ) -> str | None:
        """Of the first linear of its kind and shape, and of every one until one has none."""
        kind = (linear.name, weight.shape, bias is not None)
        if kind in self._checked:
            return None
        fault = find_fault(linear, weight, bias, tolerance=tolerance)
        if fault is None:
            self._checked.add(kind)
            return None
        return f"[{weight.shape[0]}, {weight.shape[1]}]: {fault}"

    def _log_once(self, event: str, reason: str) -> None:
        if (event, reason) not in self._reasons:
            self._reasons.add((event, reason))
            _log.warning(event, reason=reason)
