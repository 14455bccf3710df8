"""The compiled CPU kernels, loaded once per process."""

import ctypes
import functools
from ctypes import c_char_p, c_float, c_int, c_int64, c_void_p
from pathlib import Path

import structlog
import torch

from gpu_worker.kernels import build

_log = structlog.get_logger(__name__)

_ROWS = 2
"""Dimensions of a tensor of rows; one of rows of heads has three."""

_CPU_FEATURES = ("avx2", "fma", "f16c")
_OPENMP_NAMES = ("libgomp", "libiomp5", "libomp")

_Signature = tuple[type | None, tuple[type, ...]]

_PRODUCT_SIGNATURES: dict[str, _Signature] = {
    "workspace_size": (c_int64, (c_void_p, c_int64, c_int64)),
    "rows": (None, (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64)),
    "after_norm": (None, (*(c_void_p,) * 4, c_float, c_int64, c_void_p, c_void_p, c_int64)),
    "after_gate": (None, (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64)),
    "layer": (None, (*(c_void_p,) * 4, c_int64)),
}
"""Of each kind of weights."""

_SIGNATURES: dict[str, _Signature] = {
    "sluice_source_hash": (c_char_p, ()),
    "sluice_use_avx512": (c_int, (c_int,)),
    "sluice_uses_avx512": (c_int, ()),
    "sluice_partition_keys": (c_int64, ()),
    "sluice_workspace_size": (c_int64, (c_void_p, c_int64, c_int64, c_int64)),
    "sluice_attend": (None, (c_void_p, c_void_p, *(c_void_p, c_int64) * 3, c_void_p)),
    "sluice_copy_blocks": (None, (*(c_void_p, c_int64) * 2, c_int64, c_int64, c_void_p, c_int64, c_int64)),
    "sluice_rms_norm": (None, (*(c_void_p, c_int64, c_int64) * 2, c_void_p, c_float, *(c_int64,) * 4)),
    "sluice_silu_and_multiply": (None, (c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64)),
    "sluice_add_rms_norm": (None, (*(c_void_p,) * 3, c_float, c_void_p, *(c_int64,) * 3)),
    **{
        f"sluice_{kind}_{name}": signature
        for kind in ("int8", "fp32")
        for name, signature in _PRODUCT_SIGNATURES.items()
    },
    "sluice_sampling_scratch_size": (c_int64, (c_int64,)),
    "sluice_find_best": (None, (c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64)),
    "sluice_draw_rows": (None, (*(c_void_p,) * 3, c_int64, c_int64, c_void_p, c_void_p, c_int64)),
    "sluice_measure_rows": (
        None,
        (*(c_void_p,) * 3, c_int64, c_int64, *(c_void_p,) * 3, c_int64, c_void_p, c_int64),
    ),
    "sluice_rotate": (None, (c_void_p, c_int64, c_int64, c_void_p, *(c_int64,) * 4)),
}


class KernelsUnavailableError(Exception):
    """Why the library cannot be used."""


class CpuKernels:
    """The library's functions on fp32 tensors of the CPU. They run on the threads that torch is set to.

    A row's result has the same bits whatever other rows there are and however many threads.
    """

    def __init__(self, library: Path) -> None:
        """Raises KernelsUnavailableError, also for a library that was built from other sources than these."""
        _check_cpu(Path("/proc/cpuinfo"))
        if not library.exists():
            raise KernelsUnavailableError(f"{library} was not built; `python -m gpu_worker.kernels.build` says why")
        _share_openmp(Path("/proc/self/maps"))
        try:
            self.functions = ctypes.CDLL(str(library))
            self._declare()
        except (OSError, AttributeError) as error:
            raise KernelsUnavailableError(f"{library} cannot be loaded: {error}") from error
        built_from = self.functions.sluice_source_hash().decode()
        if built_from != build.source_hash():
            raise KernelsUnavailableError(f"{library} was built from other sources ({built_from}); build it again")

    def _declare(self) -> None:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self.functions, name)
            function.restype, function.argtypes = result, arguments

    @property
    def instructions(self) -> str:
        """The largest instruction set that the kernels use here; the bits of results are the same with each."""
        return "avx512-vnni" if self.functions.sluice_uses_avx512() else "avx2"

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        """`out` = normalised `rows`, [T, H] or [T, heads, H] each, whose last dimension is dense; may be in place."""
        shape, strides, out_strides = rows.shape, rows.stride(), out.stride()
        assert shape == out.shape
        assert weight.numel() == shape[-1]
        assert strides[-1] == out_strides[-1] == 1
        self.functions.sluice_rms_norm(
            rows.data_ptr(), strides[0], strides[1], out.data_ptr(), out_strides[0], out_strides[1], weight.data_ptr(), eps,
            shape[0], 1 if len(shape) == _ROWS else shape[1], shape[-1], torch.get_num_threads(),
        )  # fmt: skip

    def add_rms_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        """`hidden` [T, H] += `delta`, then `out` = its normalised rows."""
        assert hidden.shape == delta.shape == out.shape
        assert hidden.is_contiguous() and delta.is_contiguous() and out.is_contiguous()  # noqa: PT018
        assert weight.shape == hidden.shape[1:]
        self.functions.sluice_add_rms_norm(
            hidden.data_ptr(), delta.data_ptr(), weight.data_ptr(), eps, out.data_ptr(), hidden.shape[0], hidden.shape[1],
            torch.get_num_threads(),
        )  # fmt: skip

    def silu_and_multiply(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """`out` [T, I] = silu(gate) * up of `gate_up` [T, 2 * I]."""
        num_rows, width = out.shape
        assert gate_up.shape == (num_rows, 2 * width)
        assert gate_up.stride(1) == 1
        assert out.is_contiguous()
        self.functions.sluice_silu_and_multiply(
            gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), num_rows, width, torch.get_num_threads()
        )

    def rotate(self, heads: torch.Tensor, turns: torch.Tensor) -> None:
        """Turns `heads` [T, heads, D] in place by `turns` [T, 2, D / 2]: cosines, then sines."""
        num_rows, num_heads, head_dim = heads.shape
        assert turns.is_contiguous()
        assert turns.shape == (num_rows, 2, head_dim // 2)
        assert heads.stride(2) == 1
        self.functions.sluice_rotate(
            heads.data_ptr(), heads.stride(0), heads.stride(1), turns.data_ptr(), num_rows, num_heads, head_dim // 2,
            torch.get_num_threads(),
        )  # fmt: skip


@functools.cache
def load_cpu_kernels() -> CpuKernels | None:
    """The kernels, or None where they cannot be used; what they use or the reason is logged once."""
    try:
        kernels = CpuKernels(build.LIBRARY)
    except KernelsUnavailableError as error:
        _log.warning("cpu_kernels_unavailable", reason=str(error))
        return None
    _log.info("cpu_kernels_loaded", instructions=kernels.instructions)
    return kernels


def kernels_for(*tensors: torch.Tensor) -> CpuKernels | None:
    """The kernels, if they are there and work on what these tensors are."""
    for tensor in tensors:
        if tensor.dtype != torch.float32 or not tensor.is_cpu or tensor.stride(-1) != 1:
            return None
    return load_cpu_kernels()


def _check_cpu(cpuinfo: Path) -> None:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError as error:
        raise KernelsUnavailableError(f"{cpuinfo} cannot be read: {error}") from error
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    if missing := [feature for feature in _CPU_FEATURES if feature not in flags]:
        raise KernelsUnavailableError(f"this CPU lacks {', '.join(missing)}")


def _share_openmp(maps: Path) -> None:
    """Makes the OpenMP library that torch brought visible to ours, whatever its file is called: one pool of threads."""
    paths = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines()}
    for path in sorted(paths):
        if Path(path).name.startswith(_OPENMP_NAMES):
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            return
    raise KernelsUnavailableError("torch brought no OpenMP library, whose threads the kernels use")
