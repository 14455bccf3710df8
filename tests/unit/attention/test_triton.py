"""What is the Triton backend's own: other types, padding rows, steps that are recorded. The rest is in test_contract.py."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_worker.attention.port import AttentionShape, SequenceRows
from gpu_worker.attention.triton_step import StepArrays, write_page
from tests.support.paged_attention import Heads, dense, make_heads, make_triton

SHAPE = AttentionShape(num_layers=1, num_heads=6, num_kv_heads=2, head_dim=32, num_blocks=40, block_size=8)


def row(first: int, count: int, context: int, *blocks: int) -> SequenceRows:
    return SequenceRows(first_row=first, num_rows=count, context_length=context, block_table=blocks)


def test_a_step_is_told_as_slots_tables_and_items():
    rows = [row(0, 1, 5, 9, 3), row(1, 5, 6, 4, 7)]
    arrays = StepArrays.of(rows, block_size=4, short_rows=2, long_rows=3, num_padding=2)
    assert arrays.slots.tolist() == [12, 17, 18, 19, 28, 29, -1, -1]
    assert arrays.first_rows.tolist() == [0, 1, 6, 7]
    assert arrays.num_rows.tolist() == [1, 5, 1, 1]
    assert arrays.context_lengths.tolist() == [5, 6, 0, 0]
    assert arrays.table_starts.tolist() == [0, 2, 4, 4]
    assert arrays.tables.tolist() == [9, 3, 4, 7]
    assert arrays.short_items.tolist() == [[0, 0], [2, 0], [3, 0]]
    assert arrays.long_items.tolist() == [[1, 0], [1, 3]]


def test_sections_of_a_page_are_aligned_and_stand_where_their_sizes_say():
    page = np.full(200, -7, dtype=np.int32)
    sections = [np.arange(5, dtype=np.int32), np.arange(0, dtype=np.int32), np.arange(40, dtype=np.int32)]
    slices = write_page(sections, page)
    assert [place.start for place in slices] == [0, 32, 32]
    assert all((page[place] == section).all() for place, section in zip(slices, sections, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_sixteen_bits_are_the_dense_attention_within_their_rounding(dtype):
    shape = dataclasses.replace(SHAPE, softcaps=(20.0,))
    backend = make_triton(shape, dtype, dtype)
    heads = make_heads(shape, 70, 0)
    parts = [getattr(heads, part).to(dtype) for part in ("query", "key", "value")]
    table = tuple(range(9))
    outputs = []
    for start, end in ((0, 61), (61, 69), (69, 70)):
        attend = backend.begin_step([row(0, end - start, end, *table[: -(-end // 8)])])
        outputs.append(attend(0, *(part[start:end].to(backend.device) for part in parts)).cpu())
    rounded = Heads(query=parts[0].float(), key=parts[1].float(), value=parts[2].float())
    assert outputs[0].dtype == dtype
    tolerance = 2 * torch.finfo(dtype).eps
    expected = dense(rounded, shape.rules[0])
    torch.testing.assert_close(torch.cat(outputs).double(), expected, rtol=tolerance, atol=2 * tolerance)


def test_the_numbers_of_a_head_may_lie_apart():
    backend, heads = make_triton(SHAPE), make_heads(SHAPE, 12, 3)
    apart = [
        getattr(heads, part).transpose(1, 2).contiguous().transpose(1, 2).to(backend.device)
        for part in ("query", "key", "value")
    ]
    assert all(part.stride(2) > 1 for part in apart)
    result = backend.begin_step([row(0, 12, 12, 4, 2)])(0, *apart).cpu()
    torch.testing.assert_close(result.double(), dense(heads, SHAPE.rules[0]), rtol=2e-5, atol=2e-5)


def test_a_recorded_step_attends_what_stands_in_its_page_then():
    """As a CUDA graph does: made once, over a page that is written again before it runs."""
    backend = make_triton(SHAPE)
    sequences = [make_heads(SHAPE, 30, 1), make_heads(SHAPE, 30, 2)]
    tables = [(0, 1, 2, 3), (8, 7, 6, 5)]
    for heads, table in zip(sequences, tables, strict=True):
        attend = backend.begin_step([row(0, 20, 20, *table[:3])])
        attend(0, *(getattr(heads, part)[:20].to(backend.device) for part in ("query", "key", "value")))
    page = np.zeros(512, dtype=np.int32)

    def write(contexts: list[int]) -> list[slice]:
        rows = [row(i, 1, length, *tables[i][: -(-length // 8)]) for i, length in enumerate(contexts)]
        return write_page(backend.arrange(rows, 4 - len(rows)).sections, page)

    slices = write([])
    device_page = torch.from_numpy(page).to(backend.device)
    recorded = backend.step_over(
        [device_page[place] for place in [*slices[:-1], slice(slices[-1].start, None)]], 1 << 20
    )
    assert recorded.num_splits > 1
    for contexts in ([21, 21], [22]):
        write(contexts)
        device_page.copy_(torch.from_numpy(page))
        at = [length - 1 for length in contexts]
        inputs = [
            torch.stack(
                [*(getattr(sequences[i], part)[place] for i, place in enumerate(at)), *[filler] * (4 - len(at))]
            )
            for part in ("query", "key", "value")
            for filler in [torch.full_like(getattr(sequences[0], part)[0], torch.nan)]
        ]
        result = recorded(0, *(part.to(backend.device) for part in inputs)).cpu()
        for i, place in enumerate(at):
            expected = dense(sequences[i], SHAPE.rules[0])[place]
            torch.testing.assert_close(result[i].double(), expected, rtol=2e-5, atol=2e-5)
        assert (result[len(at) :] == 0).all(), "rows of padding have no context"


_COMPILE = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gpu_worker.attention import triton_kernels

def size_of(name, pointers, integers, constants, floats=()):
    types = pointers | dict.fromkeys(integers, "i32") | dict.fromkeys(floats, "fp32")
    source = ASTSource(
        fn=getattr(triton_kernels, name), signature=types | dict.fromkeys(constants, "constexpr"), constexprs=constants
    )
    return triton.compile(source, target=GPUTarget("cuda", 80, 32)).metadata.shared

meta = {name: "*i32" for name in ("items", "first_rows", "num_rows", "context_lengths", "table_starts", "tables")}
heads = dict(NUM_KV_HEADS=2, GROUP=4, HEAD_DIM=32)
tile = dict(TILE_ROWS=16, WIDTH=32)
sums = dict.fromkeys(("sums", "weights", "peaks"), "*fp32")
memory = dict.fromkeys(("keys", "values"), "*bf16")
strides = ["query_row_stride", "query_head_stride"]
print(size_of(
    "attend_items", dict.fromkeys(("query", "out"), "*bf16") | memory | sums | meta, strides,
    heads | tile | dict(SOFTCAP=30.0, WINDOW=9, BLOCK_SIZE=16, TILE_KEYS=16, IS_SPLIT=True, FACTOR=tl.bfloat16), ["scale"],
))
print(size_of(
    "merge_splits", {"out": "*bf16"} | sums | {name: meta[name] for name in ("items", "first_rows", "num_rows")}, [],
    heads | tile | dict(NUM_SPLITS=4),
))
print(size_of(
    "store_rows", dict.fromkeys(("key", "value"), "*bf16") | memory | {"slots": "*i32"},
    ["key_row_stride", "key_head_stride", "value_row_stride", "value_head_stride", "num_rows"],
    tile | dict(NUM_KV_HEADS=2, HEAD_DIM=32, BLOCK_SIZE=16),
))
"""


def test_the_kernels_compile_for_a_gpu(tmp_path: Path):
    """To machine code of compute capability 8.0; no device is needed for that."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", _COMPILE], env=environment, capture_output=True, text=True, check=False, timeout=100
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert len(result.stdout.split()) == 3
