"""What every attention backend does, against a dense computation in fp64."""

import dataclasses
import math
import random

import pytest
import torch

from gpu_worker.attention.port import AttentionShape
from gpu_worker.engine.sequence import BlockMoves
from tests.support.paged_attention import Heads, Run, dense, make_backend, make_heads, place, random_steps, sized

SMALL = AttentionShape(
    num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, num_blocks=80, block_size=4, num_host_blocks=6
)
SHAPES = {
    "multi-head": dataclasses.replace(SMALL, num_heads=3, num_kv_heads=3, head_dim=8, block_size=5),
    "multi-query": dataclasses.replace(SMALL, num_heads=5, num_kv_heads=1, head_dim=80, block_size=16),
    "grouped": dataclasses.replace(SMALL, num_heads=6, num_kv_heads=2, head_dim=64, block_size=16),
    "grouped by four": dataclasses.replace(SMALL, num_heads=8, num_kv_heads=2, head_dim=128, block_size=32),
    "block of one": dataclasses.replace(SMALL, num_blocks=700, block_size=1),
    "odd head": dataclasses.replace(SMALL, head_dim=10, block_size=8),
    "window": dataclasses.replace(SMALL, num_heads=6, block_size=16, windows=(None, 7)),
    "scale": dataclasses.replace(SMALL, scales=(0.5, None)),
    "softcap": dataclasses.replace(
        SMALL, num_heads=6, block_size=16, windows=(9, None), scales=(1.0, None), softcaps=(3.0, 50.0)
    ),
    "window beyond a tile": dataclasses.replace(SMALL, num_blocks=90, block_size=5, windows=(70, 1)),
}
CHUNKS = (1, 1, 2, 9, 40, 150)


@pytest.fixture(params=["cpu", "reference", "triton"])
def backend(request):
    return request.param


@pytest.fixture
def make(backend):
    return lambda shape: make_backend(backend, shape)


def assert_right(run: Run, number: int) -> None:
    """The sequence's outputs are the dense ones in every layer."""
    result = run.result(number)
    for layer, rule in enumerate(run.shape.rules):
        expected = dense(run.sequences[number], rule)[: result.shape[1]]
        torch.testing.assert_close(result[layer].double(), expected, rtol=2e-5, atol=2e-5)


def rounded(heads: Heads) -> Heads:
    return Heads(query=heads.query, key=heads.key.half().float(), value=heads.value.half().float())


@pytest.mark.parametrize("backend", ["cpu", "reference", "triton"])
@pytest.mark.parametrize("name", SHAPES)
def test_fp16_memory_gives_the_attention_of_rounded_keys_and_values(backend, name):
    shape, lengths = SHAPES[name], sized([130, 37], backend)
    run = start(lambda shape: make_backend(backend, shape, torch.float16), shape, lengths)
    for step in random_steps(lengths, random.Random(1), CHUNKS):
        run.step(step)
    run.sequences = [rounded(heads) for heads in run.sequences]
    for number in range(len(lengths)):
        assert_right(run, number)


def test_fp16_blocks_come_back_from_the_host():
    run = start(lambda shape: make_backend("cpu", shape, torch.float16), SMALL, [21])
    run.step([(0, 20)])
    blocks, hosts, others = run.tables[0][:5], (4, 0, 2, 5, 1), (30, 31, 32, 33, 34)
    run.backend.move(BlockMoves(to_host=tuple(zip(blocks, hosts, strict=True))))
    run.backend.blocks[:, list(blocks)] = math.nan
    run.backend.move(BlockMoves(from_host=tuple(zip(hosts, others, strict=True))))
    run.tables[0] = (*others, 35)
    run.step([(0, 1)])
    run.sequences = [rounded(heads) for heads in run.sequences]
    assert_right(run, 0)


def start(make, shape: AttentionShape, lengths: list[int], seed: int = 0) -> Run:
    sequences = [make_heads(shape, length, seed + number) for number, length in enumerate(lengths)]
    return Run(make(shape), shape, sequences, place(shape, lengths, random.Random(seed)))


@pytest.mark.parametrize("name", SHAPES)
def test_mixed_chunks_and_decodes_are_the_dense_attention_whatever_lies_in_other_slots(make, backend, name):
    lengths = sized([1, 130, 37, 75, 16], backend)
    run = start(make, SHAPES[name], lengths)
    for step in random_steps(lengths, random.Random(1), CHUNKS):
        run.step(step)
    for number in range(len(lengths)):
        assert_right(run, number)


@pytest.mark.parametrize("windows", [(), (1100, 40), (150, 40)])
def test_a_context_of_several_partitions_is_attended_whole(make, backend, windows):
    shape = dataclasses.replace(
        SMALL, num_heads=2, num_kv_heads=1, head_dim=8, num_blocks=90, block_size=16, windows=windows
    )
    # On a device, partitions are as many as keep it busy; the test's have a few keys.
    first, second, third = (140, 60, 13) if backend == "triton" else (700, 500, 93)
    run = start(make, shape, [first + second + third + 7, 9])
    for step in (
        [(0, first)], [(0, 1), (1, 5)], [(0, second)], [(1, 1), (0, 1)], [(0, 4)], [(0, third)], [(0, 1), (1, 3)],
    ):  # fmt: skip
        run.step(step)
    assert_right(run, 0)
    assert_right(run, 1)


def test_a_step_may_be_repeated(make):
    run = start(make, SMALL, [30, 20])
    run.step([(0, 13), (1, 6)])
    first, second = run.compute([(1, 1), (0, 5)]), run.compute([(1, 1), (0, 5)])
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    run.step([(1, 1), (0, 5)])
    assert_right(run, 0)


def test_what_a_rejected_draft_left_behind_the_end_has_no_influence(make):
    run = start(make, SMALL, [30])
    good = run.sequences[0]
    run.step([(0, 13)])
    key, value = good.key.clone(), good.value.clone()
    key[14:], value[14:] = math.nan, math.inf
    run.sequences[0] = Heads(query=good.query, key=key, value=value)
    run.compute([(0, 6)])
    run.sequences[0] = good
    for step in ([(0, 1)], [(0, 1)], [(0, 3)]):
        run.step(step)
    assert_right(run, 0)


def test_values_that_are_not_numbers_stay_in_their_sequence(make):
    run = start(make, SMALL, [9, 30])
    run.sequences[0].value.fill_(math.nan)
    run.step([(0, 9), (1, 21)])
    run.step([(1, 1)])
    assert run.result(0).isnan().all()
    assert_right(run, 1)


def test_moves_happen_in_the_stated_order(make):
    """One set of moves in which each field reads what the one before wrote, and saves what the next overwrites."""
    run = start(make, SMALL, [4, 4, 4])
    run.tables = [(0,), (1,), (2,)]
    for number in range(3):
        run.step([(number, 3)])
    run.backend.move(BlockMoves(to_host=((1, 5),)))
    run.backend.move(
        BlockMoves(to_host=((0, 3), (2, 4)), from_host=((3, 7), (5, 0)), duplicated=((7, 8), (8, 9), (0, 2))),
    )
    # Block 0's content went to host block 3, from there to 7, 8 and 9; block 1's over host block 5 to 0 and 2.
    run.tables = [(9,), (2,), (0,)]
    for number in (0, 1):
        run.step([(number, 1)])
        assert_right(run, number)
    run.backend.move(BlockMoves(from_host=((4, 11),)))
    run.tables[2] = (11,)
    run.step([(2, 1)])
    assert_right(run, 2)


def test_a_sequence_comes_back_from_the_host_into_other_blocks(make):
    run = start(make, SMALL, [21, 8])
    run.step([(0, 20)])
    blocks, hosts, others = run.tables[0][:5], (4, 0, 2, 5, 1), (30, 31, 32, 33, 34)
    run.backend.move(BlockMoves(to_host=tuple(zip(blocks, hosts, strict=True))))
    run.tables[1] = blocks[:2]
    run.step([(1, 8)])  # another holder writes over them
    run.backend.move(BlockMoves(from_host=tuple(zip(hosts, others, strict=True))))
    run.tables[0] = (*others, 35)
    run.step([(0, 1)])
    assert_right(run, 0)
