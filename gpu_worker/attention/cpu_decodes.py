"""What the CPU kernel is told about a step in which every sequence has one row: the same as `cpu_step` tells, sooner.

A step of one sequence spends longer in thirty small array operations than in a loop, and 64 sequences about as long.
"""

import numpy as np

from gpu_worker.attention.cpu_step import MAX_SPLIT_HEAD_ROWS, RowArrays, Work, tile_rows_for
from gpu_worker.attention.port import SequenceRows

Item = tuple[int, int, int, int, int, int, int]
"""Columns as in `Work.items`."""


def decode_arrays(rows: list[SequenceRows], block_size: int) -> RowArrays:
    """As `RowArrays.of`."""
    tables: list[int] = []
    sizes: list[tuple[int, int, int, int]] = []
    slots = [0] * len(rows)
    for row in rows:
        position = row.context_length - 1
        place, offset = divmod(position, block_size)
        sizes.append((row.first_row, 1, position, len(tables)))
        slots[row.first_row] = row.block_table[place] * block_size + offset
        tables += row.block_table[: place + 1]
    first_rows, num_rows, first_positions, table_starts = np.array(sizes, dtype=np.int64).T
    return RowArrays(
        first_rows=first_rows,
        num_rows=num_rows,
        first_positions=first_positions,
        table_starts=table_starts,
        tables=np.array(tables, dtype=np.int32),
        slots=np.array(slots, dtype=np.int64),
    )


def divide_decodes(rows: RowArrays, *, window: int | None, heads_per_kv_head: int, partition_keys: int) -> Work:
    """As `divide_work`."""
    can_split = heads_per_kv_head <= MAX_SPLIT_HEAD_ROWS
    items: list[tuple[int, Item]] = []  # with their costs
    merges: list[tuple[int, int, int, int]] = []
    num_partial_rows = cost = 0
    for table_start, first_row, position in zip(
        rows.table_starts.tolist(), rows.first_rows.tolist(), rows.first_positions.tolist(), strict=True
    ):
        first_key = 0 if window is None else max(position - window + 1, 0)
        first, end = first_key // partition_keys, position // partition_keys + 1
        item_cost = (heads_per_kv_head + 4) * (position + 1 - first_key)
        cost += item_cost
        if end - first == 1 or not can_split:
            items.append((item_cost, (table_start, first_row, 1, position, first, end - first, -1)))
            continue
        merges.append((first_row, 1, num_partial_rows, end - first))
        for partition in range(first, end):
            item = (table_start, first_row, 1, position, partition, 1, num_partial_rows)
            items.append((item_cost // (end - first), item))
            num_partial_rows += 1
    items.sort(key=lambda each: -each[0])
    return Work(
        items=np.array([item for _, item in items], dtype=np.int64),
        merges=np.array(merges, dtype=np.int64).reshape(-1, 4),
        num_partial_rows=num_partial_rows,
        max_item_rows=tile_rows_for(heads_per_kv_head),
        cost=cost,
    )
