"""Paged attention on a CUDA device by our own Triton kernels, in fp16, bf16 or fp32, over blocks of any size.

On a CPU the same kernels run under Triton's interpreter (`TRITON_INTERPRET=1` before this module is loaded), for tests.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import triton.language as tl

from gpu_worker.attention.memory import zeros
from gpu_worker.attention.port import AttentionShape, SequenceRows
from gpu_worker.attention.triton_kernels import attend_items, merge_splits, store_rows
from gpu_worker.attention.triton_step import StepArrays, page_slices, write_page
from gpu_worker.engine.sequence import BlockMoves

_LEAST_DOT = 16
"""Rows, keys and numbers of the smallest product of tiles that Triton compiles."""
_LONG_TILE_ROWS_BY_BYTES = {2: 64, 4: 32}
"""Of a tile of a long chunk by the size of a number: products of fp32 are made of many more instructions."""
_STORED_ROWS = 16
"""Rows that one program copies into their blocks."""
_MAX_SPLITS = 16
_PROGRAMS_PER_PROCESSOR = 4
_INTERPRETED_PROGRAMS = 16
_KEY_TILE_BYTES = 16384
_TRITON_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """StepArrays on the device: views of one page."""

    slots: torch.Tensor
    first_rows: torch.Tensor
    num_rows: torch.Tensor
    context_lengths: torch.Tensor
    table_starts: torch.Tensor
    short_items: torch.Tensor
    long_items: torch.Tensor
    tables: torch.Tensor


SECTION_NAMES = tuple(field.name for field in fields(StepTensors))


class TritonAttention:
    """Implements AttentionBackend. Keys and values, [num_layers, num_blocks, kv_heads, block_size, head_dim] each."""

    name = "triton"
    is_batch_invariant = False

    def __init__(
        self,
        shape: AttentionShape,
        *,
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        num_programs: int | None = None,
        least_split_keys: int = 256,
    ) -> None:
        """`dtype`: of queries, keys and values as they come; `kv_dtype`: as they are kept.
        `num_programs`: as many as keep the device busy; contexts are split while there are fewer. None asks the device.
        `least_split_keys`: fewer are not worth a program of their own.
        """
        assert shape.num_heads % shape.num_kv_heads == 0
        self.shape = shape
        self.device = device
        self.rules = shape.rules
        self.num_programs = num_programs or _num_programs(device)
        self._least_split_keys = least_split_keys
        # The interpreter's numpy has no bf16.
        self.factor = tl.float32 if device.type == "cpu" else _TRITON_TYPES[dtype]
        self.group = shape.num_heads // shape.num_kv_heads
        self.width = max(_LEAST_DOT, _power_of_two(shape.head_dim))
        self.short_tile = max(_LEAST_DOT, _power_of_two(self.group))
        self.long_tile = max(_LONG_TILE_ROWS_BY_BYTES[dtype.itemsize], _power_of_two(self.group))
        self.tile_keys = max(_LEAST_DOT, min(64, _KEY_TILE_BYTES // (self.width * dtype.itemsize)))
        block = (shape.num_kv_heads, shape.block_size, shape.head_dim)
        size = (shape.num_layers, shape.num_blocks, *block)
        host_size = (shape.num_layers, shape.num_host_blocks, *block)
        self.keys, self.values = (zeros(size, device=device, dtype=kv_dtype) for _ in range(2))
        self.host_keys, self.host_values = (
            torch.zeros(host_size, dtype=kv_dtype, pin_memory=device.type == "cuda") for _ in range(2)
        )

    def move(self, moves: BlockMoves) -> None:
        """In the order of the device's stream, as everything that reads or writes blocks."""
        for memory, host in ((self.keys, self.host_keys), (self.values, self.host_values)):
            for pairs, source, target in (
                (moves.to_host, memory, host),
                (moves.from_host, host, memory),
                (moves.duplicated, memory, memory),
            ):
                for block, copy in pairs:
                    target[:, copy].copy_(source[:, block], non_blocking=True)

    def begin_step(self, rows: list[SequenceRows]) -> "TritonStep":
        arrays = self.arrange(rows)
        sections = arrays.sections
        page = torch.zeros(page_slices([section.size for section in sections])[-1].stop, dtype=torch.int32)
        slices = write_page(sections, page.numpy())
        if self.device.type == "cuda":
            page = page.pin_memory().to(self.device, non_blocking=True)
        return self.step_over([page[place] for place in slices], arrays.longest_context)

    def arrange(self, rows: Sequence[SequenceRows], num_padding: int = 0) -> StepArrays:
        """What the kernels are told about a step of these rows and so many of padding. Changes nothing."""
        return StepArrays.of(
            rows,
            block_size=self.shape.block_size,
            short_rows=self.short_tile // self.group,
            long_rows=self.long_tile // self.group,
            num_padding=num_padding,
        )

    def step_over(self, sections: Sequence[torch.Tensor], longest_context: int) -> "TritonStep":
        """The step that the sections of StepArrays describe, on the device. They are read when a layer is attended: a
        recorded step attends what stands there then, with contexts of any length.
        """
        tensors = StepTensors(**dict(zip(SECTION_NAMES, sections, strict=True)))
        num_short = len(tensors.short_items) // 2
        return TritonStep(
            backend=self,
            tensors=tensors,
            num_short_items=num_short,
            num_long_items=len(tensors.long_items) // 2,
            num_splits=self._num_splits(num_short, longest_context),
        )

    def _num_splits(self, num_items: int, longest_context: int) -> int:
        """A power of two, because the kernels are compiled for each."""
        wanted = self.num_programs // max(1, num_items * self.shape.num_kv_heads)
        useful = longest_context // self._least_split_keys
        return 1 << max(0, min(wanted, useful, _MAX_SPLITS).bit_length() - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonStep:
    """Implements StepAttention."""

    backend: TritonAttention
    tensors: StepTensors
    num_short_items: int
    num_long_items: int
    num_splits: int

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        backend, shape = self.backend, self.backend.shape
        query, key, value = _dense_heads(query), _dense_heads(key), _dense_heads(value)
        store_rows[(-(-len(key) // _STORED_ROWS), shape.num_kv_heads)](
            key, value, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            backend.keys[layer], backend.values[layer], self.tensors.slots, len(key),
            NUM_KV_HEADS=shape.num_kv_heads, HEAD_DIM=shape.head_dim, BLOCK_SIZE=shape.block_size,
            TILE_ROWS=_STORED_ROWS, WIDTH=backend.width,
        )  # fmt: skip
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for num_items, items, tile, splits in (
            (self.num_short_items, self.tensors.short_items, backend.short_tile, self.num_splits),
            (self.num_long_items, self.tensors.long_items, backend.long_tile, 1),
        ):
            if num_items:
                self._attend(layer, query, out, items=items, grid=(num_items, shape.num_kv_heads, splits), tile=tile)
        return out

    def _attend(
        self,
        layer: int,
        query: torch.Tensor,
        out: torch.Tensor,
        *,
        items: torch.Tensor,
        grid: tuple[int, int, int],
        tile: int,
    ) -> None:
        backend, shape, tensors, rule = self.backend, self.backend.shape, self.tensors, self.backend.rules[layer]
        sizes = {"NUM_KV_HEADS": shape.num_kv_heads, "GROUP": backend.group, "HEAD_DIM": shape.head_dim}
        num_splits = grid[2]
        lanes = grid[0] * grid[1] * num_splits * tile if num_splits > 1 else 0
        sums = torch.empty(lanes * backend.width, dtype=torch.float32, device=query.device) if lanes else out
        weights, peaks = torch.empty((2, lanes), dtype=torch.float32, device=query.device) if lanes else (out, out)
        attend_items[grid](
            query, query.stride(0), query.stride(1), backend.keys[layer], backend.values[layer], out, sums, weights, peaks,
            items, tensors.first_rows, tensors.num_rows, tensors.context_lengths, tensors.table_starts, tensors.tables,
            rule.scale, SOFTCAP=rule.softcap or 0.0, WINDOW=rule.window or 0, **sizes, BLOCK_SIZE=shape.block_size,
            TILE_ROWS=tile, TILE_KEYS=backend.tile_keys, WIDTH=backend.width, IS_SPLIT=num_splits > 1, FACTOR=backend.factor,
            num_stages=2,
        )  # fmt: skip
        if num_splits > 1:
            merge_splits[grid[:2]](
                out, sums, weights, peaks, items, tensors.first_rows, tensors.num_rows,
                **sizes, TILE_ROWS=tile, WIDTH=backend.width, NUM_SPLITS=num_splits,
            )  # fmt: skip


def _dense_heads(heads: torch.Tensor) -> torch.Tensor:
    """`heads` with the numbers of each head behind each other; heads and rows may lie apart."""
    return heads if heads.stride(2) == 1 else heads.contiguous()


def _power_of_two(number: int) -> int:
    """The smallest that is not less."""
    return 1 << (number - 1).bit_length()


def _num_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return _PROGRAMS_PER_PROCESSOR * int(torch.cuda.get_device_properties(device).multi_processor_count)
