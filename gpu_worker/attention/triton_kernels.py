"""Paged attention as Triton kernels: keys and values into their blocks, attention over tiles of rows, and the merge of
contexts that several programs share. Decodes and prefill chunks are rows of the same kernel.

A program attends the rows of one item for one KV head: the heads that share a KV head lie beside each other in its tile, so
that a key is read once for all of them. Softmax runs along the keys (arXiv:2205.14135); with more than one split each
program leaves its sum, weight and maximum, and `merge_splits` joins them (as in Flash-Decoding).
"""

import triton
import triton.language as tl


# Any number of rows: not compiled anew for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["num_rows"])
def store_rows(
    key, value, key_row_stride, key_head_stride, value_row_stride, value_head_stride,
    keys, values, slots, num_rows,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (tile of rows, KV head): copies their keys and values to the rows' slots; a row of slot -1 is padding."""
    rows, head = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS), tl.program_id(1)
    slot = tl.load(slots + rows, mask=rows < num_rows, other=-1).to(tl.int64)
    numbers = tl.arange(0, WIDTH)
    is_stored = (slot >= 0)[:, None] & (numbers < HEAD_DIM)[None, :]
    place = ((slot // BLOCK_SIZE * NUM_KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM
    key_place, value_place = (
        rows * key_row_stride + head * key_head_stride,
        rows * value_row_stride + head * value_head_stride,
    )
    new_key = tl.load(key + key_place[:, None] + numbers[None, :], mask=is_stored)
    new_value = tl.load(value + value_place[:, None] + numbers[None, :], mask=is_stored)
    tl.store(keys + place[:, None] + numbers[None, :], new_key.to(keys.dtype.element_ty), mask=is_stored)
    tl.store(values + place[:, None] + numbers[None, :], new_value.to(values.dtype.element_ty), mask=is_stored)


@triton.jit
def attend_items(
    query, query_row_stride, query_head_stride, keys, values, out, sums, weights, peaks,
    items, first_rows, num_rows, context_lengths, table_starts, tables, scale,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, WIDTH: tl.constexpr, IS_SPLIT: tl.constexpr,
    FACTOR: tl.constexpr,
):  # fmt: skip
    """Program (item, KV head, split). An item is (sequence, first of its rows); it ends with the tile or the sequence.

    scale: of the product of query and key. SOFTCAP and WINDOW: 0 for none. FACTOR: type of what is
    multiplied. Scores are turned to base 2 at the end.
    """
    item, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(2)
    sequence, first = tl.load(items + 2 * item), tl.load(items + 2 * item + 1)
    context, length = tl.load(context_lengths + sequence), tl.load(num_rows + sequence)
    table = tables + tl.load(table_starts + sequence)
    lanes = tl.arange(0, TILE_ROWS)
    rows = first + lanes // GROUP
    is_row = (lanes < TILE_ROWS // GROUP * GROUP) & (rows < length)
    positions = context - length + rows
    packed_rows = (tl.load(first_rows + sequence) + rows).to(tl.int64)
    numbers = tl.arange(0, WIDTH)
    is_number = numbers < HEAD_DIM
    heads = head * GROUP + lanes % GROUP
    query_place = packed_rows * query_row_stride + heads * query_head_stride
    is_query = is_row[:, None] & is_number[None, :]
    queries = tl.load(query + query_place[:, None] + numbers[None, :], mask=is_query, other=0.0).to(FACTOR)

    end = tl.minimum(context, context - length + first + TILE_ROWS // GROUP)
    start = 0
    if WINDOW > 0:
        start = tl.maximum(0, context - length + first - WINDOW + 1) // TILE_KEYS * TILE_KEYS
    if IS_SPLIT:
        keys_each = (end - start + TILE_KEYS * num_splits - 1) // (TILE_KEYS * num_splits) * TILE_KEYS
        start += split * keys_each
        end = tl.minimum(end, start + keys_each)

    peak = tl.full([TILE_ROWS], float("-inf"), dtype=tl.float32)
    weight = tl.full([TILE_ROWS], 0.0, dtype=tl.float32)
    total = tl.full([TILE_ROWS, WIDTH], 0.0, dtype=tl.float32)
    for tile in range(start, end, TILE_KEYS):
        others = tile + tl.arange(0, TILE_KEYS)
        is_key = others < end
        block = tl.load(table + others // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        place = ((block * NUM_KV_HEADS + head) * BLOCK_SIZE + others % BLOCK_SIZE) * HEAD_DIM
        # What lies behind the end may be anything: it is not even read.
        key = tl.load(keys + place[None, :] + numbers[:, None], mask=is_key[None, :] & is_number[:, None], other=0.0)
        scores = tl.dot(queries, key.to(FACTOR), input_precision="ieee") * scale
        if SOFTCAP > 0:
            scores = SOFTCAP * (1 - 2 / (tl.exp(2 * scores / SOFTCAP) + 1))
        is_seen = is_key[None, :] & (others[None, :] <= positions[:, None])
        if WINDOW > 0:
            is_seen = is_seen & (others[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(is_seen, scores * 1.4426950408889634, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # Of a row that saw nothing yet the peak is -inf, and -inf - -inf would not be a number.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        shares = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(peak - base)
        value = tl.load(
            values + place[:, None] + numbers[None, :], mask=is_key[:, None] & is_number[None, :], other=0.0
        )
        weight = weight * shrink + tl.sum(shares, 1)
        total = total * shrink[:, None]
        total += tl.dot(shares.to(FACTOR), value.to(FACTOR), input_precision="ieee")
        peak = new_peak

    if IS_SPLIT:
        lane = ((item * NUM_KV_HEADS + head).to(tl.int64) * num_splits + split) * TILE_ROWS + lanes
        tl.store(weights + lane, weight)
        tl.store(peaks + lane, peak)
        tl.store(sums + lane[:, None] * WIDTH + numbers[None, :], total)
    else:
        result = total / tl.where(weight == 0, 1.0, weight)[:, None]
        out_place = (packed_rows * (NUM_KV_HEADS * GROUP) + heads) * HEAD_DIM
        tl.store(out + out_place[:, None] + numbers[None, :], result.to(out.dtype.element_ty), mask=is_query)


@triton.jit
def merge_splits(
    out, sums, weights, peaks, items, first_rows, num_rows,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr, WIDTH: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (item, KV head): the rows of the item from what its splits left."""
    item, head = tl.program_id(0), tl.program_id(1)
    sequence, first = tl.load(items + 2 * item), tl.load(items + 2 * item + 1)
    lanes, numbers = tl.arange(0, TILE_ROWS), tl.arange(0, WIDTH)
    rows = first + lanes // GROUP
    is_row = (lanes < TILE_ROWS // GROUP * GROUP) & (rows < tl.load(num_rows + sequence))
    peak = tl.full([TILE_ROWS], float("-inf"), dtype=tl.float32)
    weight = tl.full([TILE_ROWS], 0.0, dtype=tl.float32)
    total = tl.full([TILE_ROWS, WIDTH], 0.0, dtype=tl.float32)
    for split in range(NUM_SPLITS):
        lane = ((item * NUM_KV_HEADS + head).to(tl.int64) * NUM_SPLITS + split) * TILE_ROWS + lanes
        other_peak = tl.load(peaks + lane)
        new_peak = tl.maximum(peak, other_peak)
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        shrink, other_shrink = tl.exp2(peak - base), tl.exp2(other_peak - base)
        weight = weight * shrink + tl.load(weights + lane) * other_shrink
        total = total * shrink[:, None]
        total += tl.load(sums + lane[:, None] * WIDTH + numbers[None, :]) * other_shrink[:, None]
        peak = new_peak
    result = total / tl.where(weight == 0, 1.0, weight)[:, None]
    packed_rows = (tl.load(first_rows + sequence) + rows).to(tl.int64)
    place = (packed_rows * (NUM_KV_HEADS * GROUP) + head * GROUP + lanes % GROUP) * HEAD_DIM
    is_wanted = is_row[:, None] & (numbers < HEAD_DIM)[None, :]
    tl.store(out + place[:, None] + numbers[None, :], result.to(out.dtype.element_ty), mask=is_wanted)
