"""What the CPU kernel is told about a step: slots, and pieces of work for its threads. Arrays, made once per step.

How the work is cut decides how long a step takes, never a bit of its result.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpu_worker.attention.port import SequenceRows

Integers = npt.NDArray[np.int64]

_MAX_HEAD_ROWS = 128
"""Rows times heads of a KV head that go through a tile together: more reuse of the tile, but it has to stay in cache."""
_MAX_ROWS = 64
MAX_SPLIT_HEAD_ROWS = 32
"""Up to here a context is split over threads; more rows make enough pieces of work by themselves."""

_ROWS, _FIRST_PARTITION, _PARTITIONS, _PARTIAL = 2, 4, 5, 6
"""Columns of an item, SluiceItem of attention_tile.h."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowArrays:
    """The sequences of a step as arrays [S], their block tables behind each other, and the slot of each row."""

    first_rows: Integers
    num_rows: Integers
    first_positions: Integers
    table_starts: Integers
    tables: npt.NDArray[np.int32]
    slots: Integers

    @classmethod
    def of(cls, rows: list[SequenceRows], block_size: int) -> "RowArrays":
        sizes = np.array([(row.first_row, row.num_rows, row.context_length) for row in rows], dtype=np.int64)
        first_rows, num_rows, contexts = sizes.T
        widths = -(-contexts // block_size)
        tables = np.fromiter(
            itertools.chain.from_iterable(
                row.block_table[:width] for row, width in zip(rows, widths.tolist(), strict=True)
            ),
            dtype=np.int32,
            count=int(widths.sum()),
        )
        table_starts = np.cumsum(widths) - widths
        first_positions = contexts - num_rows
        offsets = _count_within(num_rows)
        positions = np.repeat(first_positions, num_rows) + offsets
        blocks = tables[np.repeat(table_starts, num_rows) + positions // block_size].astype(np.int64)
        slots = np.empty(int(num_rows.sum()), dtype=np.int64)
        slots[np.repeat(first_rows, num_rows) + offsets] = blocks * block_size + positions % block_size
        return cls(
            first_rows=first_rows,
            num_rows=num_rows,
            first_positions=first_positions,
            table_starts=table_starts,
            tables=tables,
            slots=slots,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Pieces of work under one window.

    items [n, 7]: table start, first row, rows, first position, first partition, partitions, partial result or -1; the most
    expensive first. merges [m, 4]: first row, rows, partial result, partial results of each row.
    """

    items: Integers
    merges: Integers
    num_partial_rows: int
    max_item_rows: int
    cost: int
    """About the keys that head rows look at, all KV heads apart; tells whether threads are worth waking."""


def divide_work(rows: RowArrays, *, window: int | None, heads_per_kv_head: int, partition_keys: int) -> Work:
    """Cuts each sequence's rows into tiles of rows, and few rows with a long context into their partitions."""
    tile_rows = tile_rows_for(heads_per_kv_head)
    last_positions = rows.first_positions + rows.num_rows
    first_tiles = rows.first_positions // tile_rows
    num_tiles = -(-last_positions // tile_rows) - first_tiles
    sequence = np.repeat(np.arange(len(num_tiles)), num_tiles)
    # Tiles end where positions are multiples of their size, so that few of them end within a tile of keys.
    grid = (first_tiles[sequence] + _count_within(num_tiles)) * tile_rows
    begins = np.maximum(rows.first_positions[sequence], grid)
    ends = np.minimum(last_positions[sequence], grid + tile_rows)
    first_keys = np.zeros_like(begins) if window is None else np.maximum(begins - window + 1, 0)

    items = np.empty((len(sequence), 7), dtype=np.int64)
    items[:, 0] = rows.table_starts[sequence]
    items[:, 1] = rows.first_rows[sequence] + begins - rows.first_positions[sequence]
    items[:, _ROWS] = ends - begins
    items[:, 3] = begins
    items[:, _FIRST_PARTITION] = first_keys // partition_keys
    items[:, _PARTITIONS] = (ends - 1) // partition_keys + 1 - items[:, _FIRST_PARTITION]
    items[:, _PARTIAL] = -1
    costs = (items[:, _ROWS] * heads_per_kv_head + 4) * (ends - first_keys)
    cost = int(costs.sum())

    is_split = (items[:, _PARTITIONS] > 1) & (items[:, _ROWS] * heads_per_kv_head <= MAX_SPLIT_HEAD_ROWS)
    merges = np.empty((0, 4), dtype=np.int64)
    if is_split.any():
        partitions = np.where(is_split, items[:, _PARTITIONS], 1)
        costs = np.repeat(costs // partitions, partitions)
        items, merges = _split(items, is_split)
    if len(items) > 1:
        items = items[np.argsort(-costs, kind="stable")]
    return Work(
        items=items,
        merges=merges,
        num_partial_rows=int((merges[:, 1] * merges[:, 3]).sum()) if len(merges) else 0,
        max_item_rows=tile_rows,
        cost=cost,
    )


def _split(items: Integers, is_split: npt.NDArray[np.bool_]) -> tuple[Integers, Integers]:
    """The chosen items as one item per partition, in place of each; and how their partial results are joined."""
    partitions = np.where(is_split, items[:, _PARTITIONS], 1)
    partial_rows = np.where(is_split, partitions * items[:, _ROWS], 0)
    partials = np.cumsum(partial_rows) - partial_rows
    merges = np.stack((items[:, 1], items[:, _ROWS], partials, partitions), axis=1)[is_split]
    number = _count_within(partitions)
    pieces, is_piece = np.repeat(items, partitions, axis=0), np.repeat(is_split, partitions)
    pieces[:, _FIRST_PARTITION] += number
    pieces[is_piece, _PARTITIONS] = 1
    pieces[is_piece, _PARTIAL] = (np.repeat(partials, partitions) + number * pieces[:, _ROWS])[is_piece]
    return pieces, merges


def tile_rows_for(heads_per_kv_head: int) -> int:
    """A power of two, so that the tiles of rows lie on the grid of the tiles of keys."""
    return min(_MAX_ROWS, 1 << max(0, (_MAX_HEAD_ROWS // heads_per_kv_head).bit_length() - 1))


def _count_within(sizes: Integers) -> Integers:
    """0, 1, … in each group of these sizes."""
    return np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
