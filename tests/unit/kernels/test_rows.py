"""Norm, gate and rotation: right, and the same bits for a row in any batch and on any number of threads."""

import pytest
import torch

from gpu_worker.layers.activation import silu_and_multiply
from gpu_worker.layers.norm import rms_norm
from gpu_worker.layers.rope import RotaryTable
from tests.support.paged_attention import need_kernels

EPS = 1e-5
WIDTHS = (1, 7, 8, 33, 100, 577, 1536)
"""The widest are shared by threads, others are not."""
BATCHES = (1, 2, 3, 7, 16, 33, 70)


@pytest.fixture(autouse=True)
def _restore_threads():
    need_kernels()
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def randn(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)) * 3


def assert_rows_alike(compute, rows: torch.Tensor) -> None:
    """compute(first, last) of any range of rows gives each row the bits that it has alone on one thread."""
    torch.set_num_threads(1)
    alone = torch.cat([compute(row, row + 1) for row in range(len(rows))])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for size in BATCHES:
            start = (len(rows) - size) // 2
            assert torch.equal(compute(start, start + size), alone[start : start + size])


@pytest.mark.parametrize("width", WIDTHS)
def test_a_norm_depends_on_its_own_row_alone(width):
    rows, weight = randn(70, width), randn(width, seed=1)
    assert_rows_alike(lambda first, last: rms_norm(rows[first:last], weight, EPS), rows)
    wide = rows.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
    torch.testing.assert_close(rms_norm(rows, weight, EPS).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("head_dim", [5, 64, 80])
def test_heads_inside_a_fused_product_are_normalised_in_place_and_nothing_else(head_dim):
    fused, weight = randn(70, 9, head_dim), randn(head_dim, seed=1)
    expected = fused.clone()
    for head in range(2, 6):
        expected[:, head] = rms_norm(fused[:, head].contiguous(), weight, EPS)
    heads = fused[:, 2:6]
    assert rms_norm(heads, weight, EPS, out=heads) is heads
    assert torch.equal(fused, expected)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_gate_depends_on_its_own_row_alone(width):
    rows = randn(70, 2 * width)
    assert_rows_alike(lambda first, last: silu_and_multiply(rows[first:last]), rows)
    gate, up = rows.double().chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(silu_and_multiply(rows).double(), expected, rtol=1e-6, atol=1e-7)


def test_a_column_of_a_gate_has_the_same_bits_wherever_it_stands():
    gate, up = randn(3, 1100), randn(3, 1100, seed=1)
    whole = silu_and_multiply(torch.cat((gate, up), dim=1))
    for width in (1, 3, 9, 511, 513, 1099):
        part = silu_and_multiply(torch.cat((gate[:, :width], up[:, :width]), dim=1))
        assert torch.equal(part, whole[:, :width])


def test_extreme_gates_close_open_or_stay_not_a_number():
    gate = torch.tensor([[-1e30, -200.0, -88.5, 0.0, 88.5, 1e30, torch.nan]])
    result = silu_and_multiply(torch.cat((gate, torch.full_like(gate, 2.0)), dim=1))[0]
    torch.testing.assert_close(result[3:6], torch.tensor([0.0, 177.0, 2e30]), rtol=1e-6, atol=0)
    assert result[1:3].abs().max() < 1e-35
    assert result[6].isnan()


@pytest.mark.parametrize("half", [1, 5, 16, 40])
def test_a_rotation_depends_on_its_own_row_alone(half):
    table = RotaryTable(1.0 / 100 ** (torch.arange(half) / half), num_positions=300, dtype=torch.float32, scale=1.25)
    fused, positions = randn(70, 34, 2 * half), torch.arange(70) * 4

    def compute(first: int, last: int) -> torch.Tensor:
        copy = fused[first:last].clone()
        table.at(positions[first:last]).apply(copy[:, 1:31])
        return copy

    assert_rows_alike(compute, fused)
    angles = (positions[:, None].float() * (1.0 / 100 ** (torch.arange(half) / half))).double()[:, None]
    first, second = fused.double()[:, 1:31].chunk(2, dim=-1)
    cos, sin = angles.cos() * 1.25, angles.sin() * 1.25
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    turned = compute(0, 70)
    torch.testing.assert_close(turned[:, 1:31].double(), expected, rtol=1e-5, atol=3e-6)
    assert torch.equal(turned[:, :1], fused[:, :1])
    assert torch.equal(turned[:, 31:], fused[:, 31:])


def test_a_table_has_the_same_bits_on_any_number_of_threads_and_for_any_last_position():
    tables = []
    for threads, num_positions in ((1, 3001), (2, 3001), (3, 5000)):
        torch.set_num_threads(threads)
        frequencies = 1.0 / 10000 ** (torch.arange(32) / 32)
        table = RotaryTable(frequencies, num_positions=num_positions, dtype=torch.float32)
        tables.append(table.at(torch.arange(3001)).turns)
    assert torch.equal(tables[0], tables[1])
    assert torch.equal(tables[0], tables[2])
