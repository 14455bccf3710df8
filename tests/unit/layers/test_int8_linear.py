"""The contract of the int8 product, its exactness, and what is used where it is missing."""

import pytest
import structlog
import torch
from torch.nn.functional import linear as torch_linear

from gpu_worker.artifacts.smoothing import round_weight
from gpu_worker.kernels.int8 import Int8Kernels
from gpu_worker.layers.activation import silu_and_multiply
from gpu_worker.layers.linear.check import find_row_dependence
from gpu_worker.layers.linear.factory import LinearFactory
from gpu_worker.layers.linear.int8 import LARGEST_WEIGHT, Int8Linear, Int8UnavailableError
from gpu_worker.layers.norm import Norm, rms_norm
from tests.support.paged_attention import need_kernels

SHAPES = [(96, 64), (576, 192), (33, 7), (1, 1), (1030, 576)]
LEVELS = 511


def make_weight(out_features, in_features, *, has_bias=True):
    generator = torch.Generator().manual_seed(out_features)
    weight, scale = round_weight(torch.randn(out_features, in_features, generator=generator))
    return weight, scale, torch.randn(out_features, generator=generator) if has_bias else None


def make_rows(num_rows, in_features):
    return torch.randn(num_rows, in_features, generator=torch.Generator().manual_seed(num_rows))


def pack(weight, scale, bias=None):
    return Int8Linear(Int8Kernels(need_kernels()), weight, scale, bias)


def whole_numbers(rows):
    """What the kernel rounds rows to, and what one of the numbers stands for."""
    largest = rows.abs().amax(dim=1, keepdim=True)
    return (rows * (LEVELS / largest)).round().double(), largest.double() / LEVELS


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_product_is_that_of_the_rounded_rows(shape, has_bias):
    weight, scale, bias = make_weight(*shape, has_bias=has_bias)
    rows = make_rows(19, shape[1])
    whole, row_scale = whole_numbers(rows)
    expected = torch_linear(whole, weight.double()) * row_scale * scale.double()
    expected = expected if bias is None else expected + bias.double()
    result = pack(weight, scale, bias)(rows)
    assert result.dtype == torch.float32
    assert result.is_contiguous()
    assert (result - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_rounding_costs_little(shape):
    weight, scale, bias = make_weight(*shape)
    rows = make_rows(19, shape[1])
    expected = torch_linear(rows, weight * scale[:, None], bias)
    assert (pack(weight, scale, bias)(rows) - expected).abs().max() <= 3e-3 * expected.abs().max()


def test_the_largest_sums_do_not_overflow():
    weight = torch.full((17, 33_000), LARGEST_WEIGHT, dtype=torch.int8)
    weight[1] = -LARGEST_WEIGHT
    rows = torch.ones(2, 33_000)
    rows[1] = -1
    result = pack(weight, torch.ones(17))(rows)
    expected = 33_000.0 * LARGEST_WEIGHT
    assert result[0].tolist() == pytest.approx([expected, -expected, *[expected] * 15])
    assert torch.equal(result[1], -result[0])


def test_rows_need_not_be_contiguous_and_are_not_changed():
    weight, scale, bias = make_weight(96, 64)
    linear = pack(weight, scale, bias)
    for rows in (make_rows(10, 128)[:, 32:96], make_rows(20, 64)[::2], make_rows(64, 10).t()):
        assert not rows.is_contiguous()
        before = rows.clone()
        assert torch.equal(linear(rows), linear(rows.contiguous()))
        assert torch.equal(rows, before)


def test_no_rows_give_no_rows():
    assert pack(*make_weight(96, 64))(make_rows(0, 64)).shape == (0, 96)


def test_zeros_give_the_bias():
    weight, scale, bias = make_weight(96, 64)
    assert torch.equal(pack(weight, scale, bias)(torch.zeros(2, 64)), bias.expand(2, 96))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("column", [0, 5, 66])
def test_what_is_not_finite_stays_in_its_row(value, column):
    linear, rows = pack(*make_weight(96, 67)), make_rows(5, 67)
    expected = linear(rows)
    rows[2, column] = value
    result = linear(rows)
    assert result[2].isnan().all()
    assert torch.equal(result[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_do_not_depend_on_their_neighbours(shape, num_threads):
    linear, rows = pack(*make_weight(*shape)), make_rows(300, shape[1])
    threads_before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([linear(row[None]) for row in rows])
        torch.set_num_threads(num_threads)
        parts = [linear(rows[:count]) for count in (1, 2, 3, 5, 6, 7, 12, 13, 64, 119, 120, 121, 241, 300)]
        assert find_row_dependence(alone, parts) is None
    finally:
        torch.set_num_threads(threads_before)


NORM = Norm(weight=torch.linspace(0.5, 2, 67), eps=1e-5)


@pytest.mark.parametrize("num_rows", [0, 1, 7, 200])
def test_what_is_fused_with_it_gives_the_bits_of_single_steps(num_rows):
    linear = pack(*make_weight(96, 67))
    hidden, delta, gate_up = make_rows(num_rows, 67), make_rows(num_rows, 67) * 2, make_rows(num_rows, 134)
    total = hidden + delta
    assert torch.equal(linear.after_norm(hidden.clone(), None, NORM), linear(rms_norm(hidden, NORM.weight, NORM.eps)))
    assert torch.equal(linear.after_norm(hidden, delta, NORM), linear(rms_norm(total, NORM.weight, NORM.eps)))
    assert torch.equal(hidden, total), "the sum stays in place"
    assert torch.equal(linear.after_gate(gate_up), linear(silu_and_multiply(gate_up)))


def test_what_is_not_finite_stays_in_its_row_in_fused_steps_too():
    linear = pack(*make_weight(96, 67))
    hidden, gate_up = make_rows(4, 67), make_rows(4, 134)
    expected = linear.after_norm(hidden, None, NORM), linear.after_gate(gate_up)
    hidden[1, 3] = gate_up[1, 3] = torch.nan
    for result, before in zip(
        (linear.after_norm(hidden, None, NORM), linear.after_gate(gate_up)), expected, strict=True
    ):
        assert result[1].isnan().all()
        assert torch.equal(result[[0, 2, 3]], before[[0, 2, 3]])


def test_it_keeps_nothing_of_its_weight():
    weight, scale, bias = make_weight(96, 64)
    linear, rows = pack(weight, scale, bias), make_rows(4, 64)
    before = linear(rows)
    for tensor in (weight, scale, bias):
        tensor.zero_()
    assert torch.equal(linear(rows), before)


def test_weights_that_the_kernel_cannot_sum_are_refused():
    weight, scale, _ = make_weight(96, 64)
    weight[3, 3] = -128
    with pytest.raises(Int8UnavailableError, match="below -127"):
        pack(weight, scale)
    with pytest.raises(Int8UnavailableError, match="40000 inputs"):
        pack(torch.zeros(1, 40_000, dtype=torch.int8), torch.ones(1))


def choose(load_kernels, *weights):
    with structlog.testing.capture_logs() as logs:
        factory = LinearFactory(load_kernels=load_kernels)
        linears = [factory(weight, bias, scale) for weight, scale, bias in weights]
    return linears, [entry["reason"] for entry in logs if entry["event"] == "linear_not_int8"]


def test_an_int8_weight_is_multiplied_as_such_where_that_works():
    linears, reasons = choose(need_kernels, make_weight(96, 64))
    assert (linears[0].name, linears[0].is_batch_invariant, reasons) == ("int8", True, [])


def test_without_the_kernels_the_weight_is_multiplied_as_the_numbers_that_it_stands_for():
    weight, scale, bias = make_weight(96, 64)
    linears, reasons = choose(lambda: None, (weight, scale, bias), (weight, scale, bias))
    assert reasons == ["the CPU kernels are missing"], "a reason is told once"
    assert linears[0].name in {"onednn", "plain"}
    rows = make_rows(3, 64)
    torch.testing.assert_close(linears[0](rows), torch_linear(rows, weight * scale[:, None], bias))


def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch):
    multiply = Int8Kernels.multiply
    monkeypatch.setattr(Int8Kernels, "multiply", lambda *arguments: 2 * multiply(*arguments))
    linears, reasons = choose(need_kernels, make_weight(96, 64), make_weight(96, 64))
    assert len(reasons) == 1
    assert "[96, 64]: its product is wrong by" in reasons[0]
    assert {linear.name for linear in linears} == {"fp32"}
