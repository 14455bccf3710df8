"""The bits of our fp32 product: those of its definition, for any tile, instruction set, number of threads and neighbours."""

import numpy as np
import pytest
import torch

from gpu_worker.kernels.fp32 import Fp32Kernels
from gpu_worker.layers.activation import silu_and_multiply
from gpu_worker.layers.linear.check import find_row_dependence
from gpu_worker.layers.linear.fp32 import Fp32Linear
from gpu_worker.layers.norm import Norm, rms_norm
from tests.support.paged_attention import need_kernels

SHAPES = [(96, 64), (576, 1536), (33, 7), (1, 1), (1030, 576), (50, 5000)]
"""Whole panels and parts of one, and more inputs than are taken at once."""
CHAIN = 128
ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15, 16, 28, 29, 33, 64, 120, 171, 300)
"""Around the rows of tiles, and of what is kept in a cache."""


def make_weight(out_features, in_features, *, has_bias=True):
    generator = torch.Generator().manual_seed(out_features)
    weight = torch.randn(out_features, in_features, generator=generator)
    return weight, torch.randn(out_features, generator=generator) if has_bias else None


def make_rows(num_rows, in_features):
    return torch.randn(num_rows, in_features, generator=torch.Generator().manual_seed(num_rows))


def pack(weight, bias=None):
    return Fp32Linear(Fp32Kernels(need_kernels()), weight, bias)


@pytest.fixture(autouse=True)
def _restore_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[False, True], ids=["avx2", "avx512"])
def with_instructions(request):
    use_avx512 = need_kernels().functions.sluice_use_avx512
    if use_avx512(request.param) != request.param:
        pytest.skip("this CPU has no AVX-512")
    yield
    use_avx512(1)


def chains(rows, weight, bias):
    """Every output as the sum of chains of CHAIN multiply-adds that round once, each in the order of the inputs."""
    totals = np.zeros((len(rows), len(weight)), np.float32)
    for begin in range(0, rows.shape[1], CHAIN):
        sums = np.zeros_like(totals)
        for i in range(begin, min(begin + CHAIN, rows.shape[1])):
            product = np.multiply.outer(rows[:, i].numpy().astype(np.longdouble), weight[:, i].numpy())
            # Exact products, and sums of 64 bits, which lie between two fp32 numbers only once in 2^40 times.
            sums = (product + sums).astype(np.float32)
        totals += sums
    return torch.from_numpy(totals if bias is None else totals + bias.numpy())


@pytest.mark.usefixtures("with_instructions")
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_output_is_the_sum_of_chains_of_multiply_adds(shape, has_bias):
    weight, bias = make_weight(*shape, has_bias=has_bias)
    rows = make_rows(3, shape[1])
    assert torch.equal(pack(weight, bias)(rows), chains(rows, weight, bias))


@pytest.mark.usefixtures("with_instructions")
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_do_not_depend_on_their_neighbours(shape, num_threads):
    linear, rows = pack(*make_weight(*shape)), make_rows(300, shape[1])
    torch.set_num_threads(1)
    alone = torch.cat([linear(row[None]) for row in rows])
    torch.set_num_threads(num_threads)
    assert find_row_dependence(alone, [linear(rows[:count]) for count in ROW_COUNTS]) is None


@pytest.mark.parametrize("shape", SHAPES)
def test_both_instruction_sets_give_the_same_bits(shape):
    use_avx512 = need_kernels().functions.sluice_use_avx512
    if not use_avx512(1):
        pytest.skip("this CPU has no AVX-512")
    linear, rows = pack(*make_weight(*shape)), make_rows(300, shape[1])
    for count in ROW_COUNTS:
        large = linear(rows[:count])
        assert not use_avx512(0)
        small = linear(rows[:count])
        assert use_avx512(1)
        assert torch.equal(large, small)


@pytest.mark.usefixtures("with_instructions")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("num_rows", [1, 5, 14, 40])
def test_what_is_not_finite_stays_in_its_row(value, num_rows):
    linear, rows = pack(*make_weight(97, 67)), make_rows(num_rows, 67)
    expected = linear(rows)
    rows[num_rows // 2, 66] = value
    result = linear(rows)
    assert not result[num_rows // 2].isfinite().any()
    others = torch.arange(num_rows) != num_rows // 2
    assert torch.equal(result[others], expected[others])


@pytest.mark.usefixtures("with_instructions")
def test_nothing_is_written_beside_the_output():
    """The last panel is not full; what follows the output in memory stays."""
    kernels, linear = need_kernels(), pack(*make_weight(35, 67))
    for num_rows in (1, 6, 14):
        rows, out = make_rows(num_rows, 67), torch.full((num_rows * 35 + 64,), 7.0)
        kernels.functions.sluice_fp32_rows(
            linear.packed.address, rows.data_ptr(), 67, num_rows, None, out.data_ptr(), 1
        )
        assert torch.equal(out[: num_rows * 35].view(num_rows, 35), linear(rows))
        assert (out[num_rows * 35 :] == 7).all()


NORM = Norm(weight=torch.linspace(0.5, 2, 67), eps=1e-5)


@pytest.mark.usefixtures("with_instructions")
@pytest.mark.parametrize("num_rows", [0, 1, 7, 200])
def test_what_is_fused_with_it_gives_the_bits_of_single_steps(num_rows):
    linear = pack(*make_weight(96, 67))
    hidden, delta, gate_up = make_rows(num_rows, 67), make_rows(num_rows, 67) * 2, make_rows(num_rows, 134)
    total = hidden + delta
    assert torch.equal(linear.after_norm(hidden.clone(), None, NORM), linear(rms_norm(hidden, NORM.weight, NORM.eps)))
    assert torch.equal(linear.after_norm(hidden, delta, NORM), linear(rms_norm(total, NORM.weight, NORM.eps)))
    assert torch.equal(hidden, total), "the sum stays in place"
    assert torch.equal(linear.after_gate(gate_up), linear(silu_and_multiply(gate_up)))


def test_it_keeps_nothing_of_its_weight():
    weight, bias = make_weight(97, 64)
    linear, rows = pack(weight, bias), make_rows(4, 64)
    before = linear(rows)
    weight.zero_()
    bias.zero_()
    assert torch.equal(linear(rows), before)


def test_a_weight_need_not_be_contiguous():
    weight, bias = make_weight(97, 128)
    rows = make_rows(4, 64)
    part = weight[:, 32:96]
    assert not part.is_contiguous()
    assert torch.equal(pack(part, bias)(rows), pack(part.clone(), bias)(rows))
