"""The CPU backend gives a row the same bits however its sequence is executed, and the test of it can fail."""

import dataclasses
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpu_worker.attention import cpu
from gpu_worker.attention.cpu import CpuAttention
from gpu_worker.attention.port import AttentionShape
from gpu_worker.kernels import build
from gpu_worker.kernels.library import CpuKernels
from tests.support.paged_attention import Run, make_backend, make_heads, need_kernels, place, random_steps

GROUPED = AttentionShape(num_layers=1, num_heads=6, num_kv_heads=2, head_dim=64, num_blocks=80, block_size=16)
SHAPES = {
    "grouped": GROUPED,
    "multi-head, gathered tiles": dataclasses.replace(GROUPED, num_heads=3, num_kv_heads=3, head_dim=16, block_size=5),
    "multi-query, window": dataclasses.replace(GROUPED, num_heads=4, num_kv_heads=1, head_dim=80, windows=(50,)),
    "softcap": dataclasses.replace(GROUPED, head_dim=32, softcaps=(2.0,)),
    "odd head": dataclasses.replace(GROUPED, num_heads=5, num_kv_heads=1, head_dim=10, block_size=8),
}
LENGTHS = [150, 3, 66, 97]


@pytest.fixture(autouse=True)
def _threads(monkeypatch):
    """Threads share even the smallest step, as many as the test sets."""
    monkeypatch.setattr(cpu, "_WORTH_THREADS", 0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def alone(shape: AttentionShape, lengths: list[int], kv_dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Each sequence by itself, row after row, on one thread, its blocks in order."""
    torch.set_num_threads(1)
    results = []
    for number, length in enumerate(lengths):
        table = tuple(range(-(-length // shape.block_size)))
        run = Run(make_backend("cpu", shape, kv_dtype), shape, [make_heads(shape, length, number)], [table])
        for _ in range(length):
            run.step([(0, 1)])
        results.append(run.result(0))
    return results


def differences(
    backend, shape: AttentionShape, lengths: list[int], expected: list[torch.Tensor], seed: int
) -> Iterator[str]:
    """Where a random execution's rows differ from the expected bits."""
    rng = random.Random(seed)
    threads = seed % 3 + 1
    torch.set_num_threads(threads)
    sequences = [make_heads(shape, length, number) for number, length in enumerate(lengths)]
    run = Run(backend, shape, sequences, place(shape, lengths, rng))
    chunks = rng.choice([(1, 2), (1, 1, 7, 30), (16, 33, 64), (500,)])
    for step in random_steps(lengths, rng, chunks):
        run.step(step)
    for number, rows in enumerate(expected):
        is_same = (run.result(number) == rows).all(-1).all(-1)[0]
        for position in (~is_same).nonzero().flatten().tolist():
            yield f"sequence {number}, position {position}, {threads} threads, chunks {chunks}"


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("name", SHAPES)
def test_rows_have_the_same_bits_in_any_batch_chunking_placement_and_number_of_threads(name, kv_dtype):
    shape = SHAPES[name]
    expected = alone(shape, LENGTHS, kv_dtype)
    for seed in range(9):
        assert not list(differences(make_backend("cpu", shape, kv_dtype), shape, LENGTHS, expected, seed))


def test_rows_have_the_same_bits_among_so_many_sequences_that_threads_take_whole_ones():
    lengths = [70, 3, 66, 40] * 3 + [5, 64]
    expected = alone(GROUPED, lengths, torch.float16)
    for seed in range(3):
        backend = make_backend("cpu", GROUPED, torch.float16)
        assert not list(differences(backend, GROUPED, lengths, expected, seed))


def test_a_context_split_over_threads_has_the_bits_of_one_that_is_not():
    """Decodes far behind are split into partitions, chunks over the same keys are not."""
    shape = dataclasses.replace(GROUPED, num_heads=2, num_kv_heads=1, head_dim=8, num_blocks=160)
    lengths, torch_threads = [2200, 40], (1, 2, 3)
    sequences = [make_heads(shape, length, number) for number, length in enumerate(lengths)]
    tables = place(shape, lengths, random.Random(3))
    results = []
    for threads in torch_threads:
        torch.set_num_threads(threads)
        whole = Run(make_backend("cpu", shape), shape, sequences, tables)
        whole.step([(1, 40), (0, 2200)])
        results.append(whole.result(0))
        pieces = Run(make_backend("cpu", shape), shape, sequences, tables)
        pieces.step([(0, 2040)])
        for count in (1, 1, 5, 16, 1, 1, 1, 20, 1):
            pieces.step([(0, count)])
        results.append(pieces.result(0))
    for result in results:
        assert torch.equal(result, results[0][:, : result.shape[1]])


def test_rows_of_a_chunk_do_not_see_what_is_not_a_number_behind_them():
    sequence = make_heads(GROUPED, 100, 0)
    run = Run(make_backend("cpu", GROUPED), GROUPED, [sequence], [tuple(range(7))])
    expected = run.compute([(0, 100)])[0]
    sequence.key[70:], sequence.value[70:] = math.nan, math.inf
    broken = run.compute([(0, 100)])[0]
    assert torch.equal(broken[:, :70], expected[:, :70])
    assert not broken[:, 70:].isfinite().any()


class TilesFromBatch(CpuAttention):
    """A planted fault: how long a tile of keys is depends on the number of rows in the step."""

    def __init__(self, shape: AttentionShape, kernels: CpuKernels, others: CpuKernels) -> None:
        super().__init__(shape, kernels)
        self.choices = (kernels, others)

    def begin_step(self, rows):
        self.kernels = self.choices[sum(row.num_rows for row in rows) > 1]
        return super().begin_step(rows)


def test_a_kernel_that_looks_at_the_batch_is_caught(tmp_path: Path):
    kernels = need_kernels()
    others = CpuKernels(build.compile_library(tmp_path / "other.so", defines=("SLUICE_TILE_KEYS=32",)))
    expected = alone(GROUPED, LENGTHS)
    planted = TilesFromBatch(GROUPED, kernels, others)
    found = [line for seed in range(3) for line in differences(planted, GROUPED, LENGTHS, expected, seed)]
    assert found
