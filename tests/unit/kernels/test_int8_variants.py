"""The int8 product with AVX2 and with AVX-512: the same bits."""

import pytest
import torch

from gpu_worker.kernels.int8 import Int8Kernels, PackedWeight
from tests.support.paged_attention import need_kernels

SHAPES = [(1, 1), (17, 31), (40, 64), (33, 67), (16, 576), (100, 1536)]
"""Outputs and inputs: whole and broken panels, pieces and pairs."""


@pytest.fixture
def in_both():
    """A function that gives what a call gives with each variant: AVX2, then AVX-512."""
    library = need_kernels()
    if not library.functions.sluice_use_avx512(1):
        pytest.skip("this CPU has no AVX-512 with VNNI")

    def run(call):
        results = []
        for variant in (0, 1):
            assert library.functions.sluice_use_avx512(variant) == variant
            results.append(call(Int8Kernels(library)))
        return results

    yield run
    library.functions.sluice_use_avx512(1)


def make_rows(num_rows, width):
    """Rows of very different sizes, the last but one of zeros, the last not finite."""
    rows = torch.randn(num_rows, width) * torch.logspace(-6, 6, num_rows)[:, None]
    if num_rows > 2:
        rows[-2] = 0
        rows[-1, -1] = torch.nan
    return rows


def assert_same_bits(first, second):
    assert torch.equal(first.view(torch.int32), second.view(torch.int32))


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_number_of_rows_gets_the_same_bits(in_both, shape, has_bias):
    num_outputs, num_inputs = shape
    weight = torch.randint(-127, 128, shape, dtype=torch.int8)
    packed = PackedWeight(weight, torch.rand(num_outputs), torch.randn(num_outputs) if has_bias else None)
    for num_rows in (*range(1, 41), 128, 129, 300):
        rows = make_rows(num_rows, num_inputs)
        assert_same_bits(*in_both(lambda kernels, rows=rows: kernels.multiply(rows, packed)))


def test_the_largest_sums_get_the_same_bits(in_both):
    packed = PackedWeight(torch.full((16, 8192), -127, dtype=torch.int8), torch.ones(16), None)
    for num_rows in (1, 2, 3, 16):
        rows = torch.ones(num_rows, 8192)
        first, second = in_both(lambda kernels, rows=rows: kernels.multiply(rows, packed))
        assert_same_bits(first, second)
        assert first.mean().item() == pytest.approx(-127 * 8192, rel=1e-6)


@pytest.mark.parametrize("num_rows", [1, 7, 20])
def test_what_is_fused_with_it_gets_the_same_bits(in_both, num_rows):
    packed = PackedWeight(torch.randint(-127, 128, (50, 67), dtype=torch.int8), torch.rand(50), None)
    hidden, delta, norm, gate_up = (
        torch.randn(num_rows, 67),
        torch.randn(num_rows, 67),
        torch.rand(67),
        torch.randn(num_rows, 134),
    )
    assert_same_bits(*in_both(lambda kernels: kernels.multiply_after_norm(hidden.clone(), delta, (norm, 1e-5), packed)))
    assert_same_bits(*in_both(lambda kernels: kernels.multiply_after_gate(gate_up, packed)))
