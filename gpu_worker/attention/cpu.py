"""Paged attention by our own kernel on the CPU, in fp32 over keys and values in fp32 or fp16.

The same bits for a row however it is executed; gpu_worker/kernels/attention.cpp says by what construction.
"""

import ctypes
import math
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import torch

from gpu_worker.attention.cpu_decodes import decode_arrays, divide_decodes
from gpu_worker.attention.cpu_step import Integers, RowArrays, Work, divide_work
from gpu_worker.attention.memory import zeros
from gpu_worker.attention.port import AttentionShape, ScoreRule, SequenceRows
from gpu_worker.engine.sequence import BlockMoves
from gpu_worker.kernels.layer import AddressedStep
from gpu_worker.kernels.library import CpuKernels

_LANES = 8
_LOG2_E = math.log2(math.e)
_WORTH_THREADS = 500_000
"""Multiplications of a layer below which other threads, which may have to wake up, cost more than they save."""


class _Shape(ctypes.Structure):
    """SluiceShape of attention_tile.h."""

    _fields_ = (
        *((name, c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "value_stride", "block_size")),
        ("scale", c_float),
        ("softcap", c_float),
        ("stored_bytes", c_int32),
    )


class _Step(ctypes.Structure):
    """SluiceStep of attention_tile.h."""

    _fields_ = (
        ("shape", _Shape),
        *((name, c_int64) for name in ("threads", "num_rows", "num_items", "num_merges", "window", "max_item_rows")),
        *((name, c_void_p) for name in ("slots", "tables", "items", "merges", "workspace")),
    )


class CpuAttention:
    """Implements AttentionBackend. One tensor [num_layers, num_blocks, numbers of a block]; the host tier is another.

    A block holds, for each KV head, its keys transposed [head_dim, block_size] and its values [block_size, head_dim rounded
    up to whole vectors].
    """

    name = "cpu"
    is_batch_invariant = True

    def __init__(self, shape: AttentionShape, kernels: CpuKernels, kv_dtype: torch.dtype = torch.float32) -> None:
        assert kv_dtype in (torch.float32, torch.float16)
        self.shape = shape
        self.kernels = kernels
        value_stride = -(-shape.head_dim // _LANES) * _LANES
        self._block_numbers = shape.num_kv_heads * shape.block_size * (shape.head_dim + value_stride)
        self._rules = shape.rules
        assert shape.num_heads % shape.num_kv_heads == 0
        size = (shape.num_layers, shape.num_blocks, self._block_numbers)
        host_size = (shape.num_layers, shape.num_host_blocks, self._block_numbers)
        self.blocks = zeros(size, device=torch.device("cpu"), dtype=kv_dtype)
        self.host_blocks = zeros(host_size, device=torch.device("cpu"), dtype=kv_dtype)
        self._c_shapes = {
            rule: _Shape(
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                value_stride=value_stride,
                block_size=shape.block_size,
                scale=rule.scale * _LOG2_E if rule.softcap is None else rule.scale / rule.softcap,
                softcap=(rule.softcap or 0) * _LOG2_E,
                stored_bytes=kv_dtype.itemsize,
            )
            for rule in self._rules
        }
        self.layer_addresses = tuple(layer.data_ptr() for layer in self.blocks)
        self._partition_keys = kernels.functions.sluice_partition_keys()
        self._workspace = torch.empty(0, dtype=torch.float32)

    def move(self, moves: BlockMoves) -> None:
        for pairs, source, target in (
            (moves.to_host, self.blocks, self.host_blocks),
            (moves.from_host, self.host_blocks, self.blocks),
            (moves.duplicated, self.blocks, self.blocks),
        ):
            if pairs:
                self._copy(np.array(pairs, dtype=np.int64), source, target)

    def _copy(self, pairs: Integers, source: torch.Tensor, target: torch.Tensor) -> None:
        is_inside = (pairs >= 0) & (pairs < (source.shape[1], target.shape[1]))
        assert is_inside.all(), "a block outside the memory"
        size = source.itemsize
        self.kernels.functions.sluice_copy_blocks(
            source.data_ptr(), size * source.stride(0), target.data_ptr(), size * target.stride(0), self.shape.num_layers,
            size * self._block_numbers, pairs.ctypes.data, len(pairs), torch.get_num_threads(),
        )  # fmt: skip

    def begin_step(self, rows: list[SequenceRows]) -> "CpuStep":
        is_decode = all(row.num_rows == 1 for row in rows)
        arrays = (decode_arrays if is_decode else RowArrays.of)(rows, self.shape.block_size)
        divide = divide_decodes if is_decode else divide_work
        assert 0 <= arrays.tables.min() <= arrays.tables.max() < self.shape.num_blocks, "a block outside the memory"
        work_by_window = {
            window: divide(
                arrays,
                window=window,
                heads_per_kv_head=self.shape.num_heads // self.shape.num_kv_heads,
                partition_keys=self._partition_keys,
            )
            for window in {rule.window for rule in self._rules}
        }
        threads = torch.get_num_threads()
        workspace = self._reserve(threads, list(work_by_window.values()))
        steps = {rule: self._c_step(arrays, work_by_window[rule.window], rule, threads) for rule in self._c_shapes}
        return CpuStep(
            backend=self,
            steps=tuple(steps[rule] for rule in self._rules),
            kept=(arrays, work_by_window, workspace),
            num_rows=len(arrays.slots),
        )

    def _reserve(self, threads: int, works: list[Work]) -> torch.Tensor:
        """The workspace, made larger if these works need it; a step keeps the one that it was made with."""
        shape = next(iter(self._c_shapes.values()))  # the sizes are the same in all
        needed = max(
            self.kernels.functions.sluice_workspace_size(
                ctypes.addressof(shape), threads, work.max_item_rows, work.num_partial_rows
            )
            for work in works
        )
        if needed > len(self._workspace):
            self._workspace = torch.empty(needed, dtype=torch.float32)
        return self._workspace

    def _c_step(self, arrays: RowArrays, work: Work, rule: ScoreRule, threads: int) -> _Step:
        return _Step(
            shape=self._c_shapes[rule],
            threads=threads if work.cost * self.shape.num_kv_heads * self.shape.head_dim >= _WORTH_THREADS else 1,
            num_rows=len(arrays.slots),
            num_items=len(work.items),
            num_merges=len(work.merges),
            window=rule.window or 0,
            max_item_rows=work.max_item_rows,
            slots=arrays.slots.ctypes.data,
            tables=arrays.tables.ctypes.data,
            items=work.items.ctypes.data,
            merges=work.merges.ctypes.data,
            workspace=self._workspace.data_ptr(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuStep(AddressedStep):
    """Implements StepAttention. `kept` owns the memory that `steps`, one per layer, point to."""

    backend: CpuAttention
    steps: tuple[_Step, ...]
    kept: tuple[object, ...]
    num_rows: int

    def addresses(self, layer: int) -> tuple[int, int]:
        return ctypes.addressof(self.steps[layer]), self.backend.layer_addresses[layer]

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        shape = self.backend.shape
        assert query.shape == (self.num_rows, shape.num_heads, shape.head_dim)
        assert key.shape == value.shape == (self.num_rows, shape.num_kv_heads, shape.head_dim)
        query, key, value = _dense_rows(query), _dense_rows(key), _dense_rows(value)
        out = torch.empty(query.shape, dtype=torch.float32)
        self.backend.kernels.functions.sluice_attend(
            ctypes.addressof(self.steps[layer]), self.backend.layer_addresses[layer], query.data_ptr(), query.stride(0),
            key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0), out.data_ptr(),
        )  # fmt: skip
        return out


def _dense_rows(heads: torch.Tensor) -> torch.Tensor:
    """`heads` with the heads of each row behind each other; rows may lie apart, as in a fused product."""
    assert heads.dtype == torch.float32
    return heads if heads.stride()[1:] == (heads.shape[2], 1) else heads.contiguous()
