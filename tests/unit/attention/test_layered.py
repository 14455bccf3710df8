"""Layers of different heads and sizes, each as if it were alone with its geometry."""

import itertools
import math
from functools import partial

import pytest
import torch

from gpu_worker.attention.layered import BlockCounts, LayeredAttention, LayerGeometry, make_layered
from gpu_worker.attention.port import AttentionShape, SequenceRows
from gpu_worker.engine.sequence import BlockMoves
from tests.support.paged_attention import dense, make_backend, make_heads

SMALL = LayerGeometry(num_heads=4, num_kv_heads=2, head_dim=16, window=5)
LARGE = LayerGeometry(num_heads=4, num_kv_heads=1, head_dim=32, scale=0.7, softcap=4.0)
LAYERS = (SMALL, LARGE, LayerGeometry(num_heads=4, num_kv_heads=2, head_dim=16))
BLOCKS = BlockCounts(num_blocks=12, block_size=4, num_host_blocks=3)
LENGTH = 11


def shape_of(layer: LayerGeometry) -> AttentionShape:
    return AttentionShape(
        num_layers=1,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        num_blocks=1,
        block_size=1,
        windows=(layer.window,),
        scales=(layer.scale,),
        softcaps=(layer.softcap,),
    )


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_every_layer_attends_with_its_own_heads_over_common_blocks_and_moves(name):
    attention = make_layered(LAYERS, BLOCKS, partial(make_backend, name))
    assert isinstance(attention, LayeredAttention)
    sequences = [make_heads(shape_of(layer), LENGTH, seed) for seed, layer in enumerate(LAYERS)]
    outputs: list[list[torch.Tensor]] = [[] for _ in LAYERS]
    table = (7, 2, 9)
    for start, end in itertools.pairwise((0, 6, 7, LENGTH)):
        row = SequenceRows(first_row=0, num_rows=end - start, context_length=end, block_table=table)
        attend = attention.begin_step([row])
        for layer, heads in enumerate(sequences):
            parts = (heads.query[start:end], heads.key[start:end], heads.value[start:end])
            outputs[layer].append(attend(layer, *parts))
        # Out to the host, and back into other blocks.
        attention.move(BlockMoves(to_host=tuple(zip(table, range(3), strict=True))))
        table = (table[1], table[2], table[0] - 1)
        attention.move(BlockMoves(from_host=tuple(zip(range(3), table, strict=True))))
    for layer, (geometry, heads) in enumerate(zip(LAYERS, sequences, strict=True)):
        expected = dense(heads, shape_of(geometry).rules[0])
        torch.testing.assert_close(torch.cat(outputs[layer]).double(), expected, rtol=2e-5, atol=2e-5)


def test_layers_of_one_geometry_have_one_backend():
    attention = make_layered((LAYERS[0], LAYERS[2]), BLOCKS, partial(make_backend, "reference"))
    assert not isinstance(attention, LayeredAttention)
    assert [(rule.window, rule.scale) for rule in attention.rules] == [
        (5, 1 / math.sqrt(16)),
        (None, 1 / math.sqrt(16)),
    ]


def test_what_is_said_of_all_backends_holds_for_each(monkeypatch):
    attention = make_layered(LAYERS, BLOCKS, partial(make_backend, "reference"))
    assert (attention.name, attention.is_batch_invariant) == ("reference", False)
    assert [layer.kv_bytes_per_token(4) for layer in LAYERS] == [256, 256, 256]
