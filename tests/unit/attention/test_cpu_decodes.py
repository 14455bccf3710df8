"""A step of decodes is told to the CPU kernel by a way of its own: the same, number for number."""

from dataclasses import fields

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.attention.cpu_decodes import decode_arrays, divide_decodes
from gpu_worker.attention.cpu_step import RowArrays, divide_work
from gpu_worker.attention.port import SequenceRows

BLOCK_SIZE = 4
PARTITION_KEYS = 16


@st.composite
def decodes(draw):
    """Rows of 1 to 6 sequences in any order in the batch; the tables hold a block or two more than is needed."""
    contexts = draw(st.lists(st.integers(1, 100), min_size=1, max_size=6))
    places = draw(st.permutations(range(len(contexts))))
    rows = []
    for number, (place, context) in enumerate(zip(places, contexts, strict=True)):
        num_blocks = -(-context // BLOCK_SIZE) + draw(st.integers(0, 2))
        table = tuple(draw(st.permutations(range(number * 100, number * 100 + num_blocks))))
        rows.append(SequenceRows(first_row=place, num_rows=1, context_length=context, block_table=table))
    return rows


def assert_equal(one, other):
    for field in fields(one):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype, field.name
            assert left.shape == right.shape, field.name
        assert np.array_equal(left, right), field.name


@given(rows=decodes(), window=st.none() | st.integers(1, 60), heads_per_kv_head=st.sampled_from([1, 3, 32, 33, 71]))
def test_decodes_are_told_as_rows_of_any_step_are(rows, window, heads_per_kv_head):
    arrays = decode_arrays(rows, BLOCK_SIZE)
    assert_equal(arrays, RowArrays.of(rows, BLOCK_SIZE))
    rule = {"window": window, "heads_per_kv_head": heads_per_kv_head, "partition_keys": PARTITION_KEYS}
    assert_equal(divide_decodes(arrays, **rule), divide_work(arrays, **rule))


def test_the_kernel_gets_dense_arrays():
    rows = [SequenceRows(first_row=row, num_rows=1, context_length=50, block_table=tuple(range(13))) for row in (1, 0)]
    arrays = decode_arrays(rows, BLOCK_SIZE)
    work = divide_decodes(arrays, window=None, heads_per_kv_head=1, partition_keys=PARTITION_KEYS)
    assert len(work.merges) == 2
    for array in (arrays.tables, arrays.slots, work.items, work.merges):
        assert array.flags.c_contiguous
