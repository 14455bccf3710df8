"""What the Triton kernels are told about a step, as integers in one page, so that one copy brings them to the device. Pure.

Sections start at multiples of 128 bytes: Triton compiles a kernel anew for a pointer of another alignment. The block tables
come last, so that where the others stand depends only on their sizes, and a recorded graph finds them again.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpu_worker.attention.port import SequenceRows

Integers = npt.NDArray[np.int32]

_ALIGNMENT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays:
    """The rows [T] and sequences [S] of a step.

    slots: of each row, -1 for padding. table_starts: where a sequence's block table begins in `tables`. Items are (sequence,
    first of its rows): short ones hold the rows of a decode or a small chunk, the long ones tiles of longer chunks.
    """

    slots: Integers
    first_rows: Integers
    num_rows: Integers
    context_lengths: Integers
    table_starts: Integers
    short_items: Integers
    long_items: Integers
    tables: Integers

    @classmethod
    def of(
        cls, rows: Sequence[SequenceRows], *, block_size: int, short_rows: int, long_rows: int, num_padding: int = 0
    ) -> "StepArrays":
        """`short_rows`, `long_rows`: rows in a tile of each kind. Padding: rows of sequences that have no context."""
        nothing = SequenceRows(first_row=0, num_rows=1, context_length=0, block_table=())
        sequences = [*rows, *[nothing] * num_padding]
        counts = np.array([each.num_rows for each in sequences], dtype=np.int32)
        contexts = np.array([each.context_length for each in sequences], dtype=np.int32)
        sizes = [-(-each.context_length // block_size) for each in sequences]
        starts = np.array([0, *itertools.accumulate(sizes)], dtype=np.int32)
        blocks = (each.block_table[:size] for each, size in zip(sequences, sizes, strict=True))
        tables = np.fromiter(itertools.chain.from_iterable(blocks), dtype=np.int32, count=int(starts[-1]))
        first_rows = np.array([0, *itertools.accumulate(counts.tolist())], dtype=np.int32)[:-1]
        is_short = counts <= short_rows
        # Sequence and position of each row.
        owners = np.repeat(np.arange(len(sequences)), counts)
        positions = np.arange(len(owners)) + np.repeat(contexts - counts - first_rows, counts)
        is_real = positions >= 0
        places = np.where(is_real, starts[owners] + positions // block_size, 0)
        in_block = tables[places] * block_size + positions % block_size if len(tables) else positions
        return cls(
            slots=np.where(is_real, in_block, -1).astype(np.int32),
            first_rows=first_rows,
            num_rows=counts,
            context_lengths=contexts,
            table_starts=starts[:-1],
            short_items=_items(counts, np.flatnonzero(is_short), short_rows),
            long_items=_items(counts, np.flatnonzero(~is_short), long_rows),
            tables=tables,
        )

    @property
    def longest_context(self) -> int:
        return int(self.context_lengths.max(initial=0))

    @property
    def sections(self) -> tuple[Integers, ...]:
        """All of it, the tables last."""
        return (
            self.slots, self.first_rows, self.num_rows, self.context_lengths, self.table_starts,
            self.short_items.reshape(-1), self.long_items.reshape(-1), self.tables,
        )  # fmt: skip


def _items(counts: Integers, sequences: npt.NDArray[np.int64], tile_rows: int) -> Integers:
    """The rows of the chosen sequences cut into tiles, [items, 2]."""
    pieces = [(sequence, first) for sequence in sequences.tolist() for first in range(0, counts[sequence], tile_rows)]
    return np.array(pieces, dtype=np.int32).reshape(-1, 2)


def page_slices(sizes: Sequence[int]) -> list[slice]:
    """Where in a page sections of these sizes stand."""
    starts = itertools.accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes[:-1]), initial=0)
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def write_page(sections: Sequence[Integers], page: Integers) -> list[slice]:
    """Puts sections into a page, which is large enough; where they stand."""
    slices = page_slices([section.size for section in sections])
    for place, section in zip(slices, sections, strict=True):
        page[place] = section
    return slices
