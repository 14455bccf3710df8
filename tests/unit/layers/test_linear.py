"""The contract of a matrix product, on all implementations for fp32 weights, and how one of them is chosen."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import structlog
import torch
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import silu

from gpu_worker.kernels.fp32 import Fp32Kernels
from gpu_worker.layers.linear.check import find_fault, find_row_dependence
from gpu_worker.layers.linear.factory import LinearFactory
from gpu_worker.layers.linear.fp32 import Fp32Linear
from gpu_worker.layers.linear.onednn import OneDnnLinear, OneDnnUnavailableError, find_operators
from gpu_worker.layers.linear.plain import PlainLinear
from gpu_worker.layers.linear.row_sizes import LARGEST_SIZE, round_up
from gpu_worker.layers.norm import Norm, rms_norm
from tests.support.paged_attention import need_kernels

SHAPES = [(96, 64), (576, 192), (33, 7), (1, 1), (1030, 576)]
OPERATORS = torch.ops.mkldnn


def make_weight(out_features, in_features, *, has_bias=True):
    generator = torch.Generator().manual_seed(out_features)
    weight = torch.randn(out_features, in_features, generator=generator)
    return weight, torch.randn(out_features, generator=generator) if has_bias else None


def make_rows(num_rows, in_features):
    return torch.randn(num_rows, in_features, generator=torch.Generator().manual_seed(num_rows))


def pack(weight, bias=None):
    return OneDnnLinear(find_operators(OPERATORS), weight, bias)


def pack_ours(weight, bias=None):
    return Fp32Linear(Fp32Kernels(need_kernels()), weight, bias)


@pytest.fixture(params=[pack_ours, pack, PlainLinear], ids=["fp32", "onednn", "plain"])
def make_linear(request):
    return request.param


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_is_right(shape, has_bias, make_linear):
    weight, bias = make_weight(*shape, has_bias=has_bias)
    rows = make_rows(19, shape[1])
    result = make_linear(weight, bias)(rows)
    expected = torch_linear(rows.double(), weight.double(), None if bias is None else bias.double())
    assert result.dtype == torch.float32
    assert (result - expected).abs().max() <= 2e-6 * shape[1] ** 0.5 * max(1.0, float(expected.abs().max()))


def test_rows_need_not_be_contiguous(make_linear):
    weight, bias = make_weight(96, 64)
    linear = make_linear(weight, bias)
    wide = make_rows(10, 128)
    every_second = make_rows(20, 64)[::2]
    transposed = make_rows(64, 10).t()
    for rows in (wide[:, 32:96], every_second, transposed):
        assert not rows.is_contiguous()
        before = rows.clone()
        # The plain one may sum in another order where its numbers lie otherwise in memory.
        torch.testing.assert_close(linear(rows), linear(rows.contiguous()))
        if linear.is_batch_invariant:
            assert torch.equal(linear(rows), linear(rows.contiguous()))
        assert torch.equal(rows, before)


def test_no_rows_give_no_rows(make_linear):
    linear = make_linear(*make_weight(96, 64))
    assert linear(make_rows(0, 64)).shape == (0, 96)


def test_what_is_not_a_number_stays_in_its_row(make_linear):
    linear = make_linear(*make_weight(96, 64))
    rows = make_rows(5, 64)
    expected = linear(rows)
    rows[2] = torch.nan
    result = linear(rows)
    assert result[2].isnan().all()
    assert torch.equal(result[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_a_packed_product_do_not_depend_on_their_neighbours(shape, num_threads):
    weight, bias = make_weight(*shape)
    linear, rows = pack(weight, bias), make_rows(300, shape[1])
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = linear(rows)
    try:
        torch.set_num_threads(num_threads)
        parts = [
            linear(rows[:count]) for count in (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 33, 48, 64, 65, 100, 128, 255, 300)
        ]
        assert find_row_dependence(alone, parts) is None
        single = torch.cat([linear(row[None]) for row in rows[-40:]])
        assert torch.equal(single, alone[-40:])
    finally:
        torch.set_num_threads(threads_before)


SIZES = sorted({round_up(num_rows) for num_rows in range(1, LARGEST_SIZE + 1)})


def test_the_sizes_that_rows_are_padded_to_are_few_and_near():
    assert SIZES[:17] == [*range(1, 17), 18]
    assert {32, 64, 128, 256, 512} < set(SIZES)
    assert len(SIZES) == 56
    for num_rows in range(LARGEST_SIZE + 1):
        size = round_up(num_rows)
        assert num_rows <= size <= num_rows * 9 / 8
        assert round_up(size) == size
        assert not any(num_rows <= smaller < size for smaller in SIZES)


def test_only_numbers_of_rows_that_are_sizes_reach_the_operator():
    """It keeps memory for each number that it ever saw."""
    seen = []

    def multiply(rows, *rest):
        seen.append(rows)
        return OPERATORS._linear_pointwise(rows, *rest)

    operators = replace(find_operators(OPERATORS), multiply=multiply)
    weight, bias = make_weight(33, 7)
    linear = OneDnnLinear(operators, weight, bias)
    for num_rows in [*range(1, 2 * LARGEST_SIZE + 40), 5 * LARGEST_SIZE + 17]:
        seen.clear()
        rows = make_rows(num_rows, 7)
        assert linear(rows).shape == (num_rows, 33)
        numbers = [len(part) for part in seen]
        assert set(numbers) <= set(SIZES)
        assert len(numbers) == -(-num_rows // LARGEST_SIZE)
        together = torch.cat(seen)
        assert torch.equal(together[:num_rows], rows)
        assert not together[num_rows:].any()


BORDERS = [size + step for size in (1, 16, 18, 32, 36, 64, 72, 128, 256, 480, 512, 1024) for step in (-1, 0, 1)]


@pytest.mark.parametrize("shape", [(33, 7), (96, 64), (1030, 576)])
def test_padding_and_cutting_change_no_bits(shape):
    weight, bias = make_weight(*shape)
    linear, rows = pack(weight, bias), make_rows(BORDERS[-1] + 1, 2 * shape[1])[:, ::2]
    assert not rows.is_contiguous()
    single = torch.cat([linear(row[None]) for row in rows])
    before = rows.clone()
    results = [linear(rows[:num_rows]) for num_rows in BORDERS]
    assert [len(result) for result in results] == BORDERS
    assert find_row_dependence(single, results) is None
    assert find_row_dependence(single[3:], [linear(rows[3:])]) is None, "cut at other rows"
    assert all(result.is_contiguous() for result in results)
    assert torch.equal(rows, before)


def test_a_packed_product_keeps_nothing_of_its_weight():
    weight, bias = make_weight(96, 64)
    linear, rows = pack(weight, bias), make_rows(4, 64)
    before = linear(rows)
    weight.zero_()
    bias.zero_()
    assert torch.equal(linear(rows), before)


class SingleRowsOtherwise:
    """A product whose sums run in another order when there is one row: what packing for a batch of one does."""

    def __init__(self, weight, bias):
        self._weight, self._bias = weight, bias

    def __call__(self, rows):
        if len(rows) != 1:
            return torch_linear(rows, self._weight, self._bias)
        half = rows.shape[1] // 2
        return torch_linear(rows[:, :half], self._weight[:, :half], self._bias) + torch_linear(
            rows[:, half:], self._weight[:, half:]
        )


def test_a_product_that_depends_on_the_number_of_rows_is_found_out():
    weight, bias = make_weight(576, 192)
    assert find_fault(pack(weight, bias), weight, bias) is None
    assert "a product of 1 rows has other bits" in find_fault(SingleRowsOtherwise(weight, bias), weight, bias)


def test_a_product_that_is_wrong_is_found_out():
    weight, bias = make_weight(96, 64)
    assert "wrong by" in find_fault(pack(weight, None), weight, bias)
    assert "wrong by" in find_fault(pack(weight.flip(0), bias), weight, bias)


def test_a_weight_that_is_not_a_number_is_no_fault():
    weight, bias = make_weight(96, 64)
    weight[3, 5] = torch.nan
    assert find_fault(pack(weight, bias), weight, bias) is None
    weight[:] = torch.nan
    assert find_fault(pack(weight, bias), weight, bias) is None


def choose(namespace, weight, bias=None, *, load_kernels=lambda: None):
    """The linear of a process with these operators, and why it is not our kernel's and not packed by oneDNN."""
    with structlog.testing.capture_logs() as logs:
        factory = LinearFactory(namespace=namespace, load_kernels=load_kernels)
        linears = [factory(weight, bias) for _ in range(3)]
    events = ("linear_not_ours", "linear_not_packed")
    return linears[0], *([entry["reason"] for entry in logs if entry["event"] == event] for event in events)


def test_a_weight_is_multiplied_by_our_kernel_where_that_works():
    linear, *reasons = choose(OPERATORS, *make_weight(576, 1536), load_kernels=need_kernels)
    assert (linear.name, linear.is_batch_invariant, reasons) == ("fp32", True, [[], []])


def test_without_the_kernels_a_weight_is_packed_by_onednn_and_the_reason_told_once():
    linear, *reasons = choose(OPERATORS, *make_weight(96, 64))
    assert (linear.name, linear.is_batch_invariant) == ("onednn", True)
    assert reasons == [["the CPU kernels are missing"], []]


def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch):
    multiply = Fp32Kernels.multiply
    monkeypatch.setattr(Fp32Kernels, "multiply", lambda *arguments: 2 * multiply(*arguments))
    linear, reasons, _ = choose(OPERATORS, *make_weight(96, 64), load_kernels=need_kernels)
    assert linear.name == "onednn"
    assert len(reasons) == 1
    assert "[96, 64]: its product is wrong by" in reasons[0]


def for_a_batch_of_one(weight, _):
    return weight


def broken(*_):
    raise RuntimeError("no such primitive")


FALL_BACKS = {
    "no operators": (SimpleNamespace(), "has no operator mkldnn._reorder_linear_weight"),
    "one operator": (
        SimpleNamespace(_reorder_linear_weight=OPERATORS._reorder_linear_weight),
        "has no operator mkldnn._linear_pointwise",
    ),
    "packing fails": (
        SimpleNamespace(_reorder_linear_weight=broken, _linear_pointwise=OPERATORS._linear_pointwise),
        "packing failed: no such primitive",
    ),
    "product fails": (
        SimpleNamespace(_reorder_linear_weight=OPERATORS._reorder_linear_weight, _linear_pointwise=broken),
        "its product failed: no such primitive",
    ),
    "rows depend on their number": (
        SimpleNamespace(
            _reorder_linear_weight=for_a_batch_of_one,
            _linear_pointwise=lambda rows, weight, bias, *_: SingleRowsOtherwise(weight, bias)(rows),
        ),
        "[576, 192]: a product of 1 rows has other bits",
    ),
}


@pytest.mark.parametrize("case", FALL_BACKS)
def test_the_plain_product_is_used_with_a_reason_where_packing_does_not_work(case):
    namespace, reason = FALL_BACKS[case]
    weight, bias = make_weight(576, 192)
    linear, _, reasons = choose(namespace, weight, bias)
    assert (linear.name, linear.is_batch_invariant) == ("plain", False)
    assert len(reasons) == 1, "a reason is told once"
    assert reason in reasons[0]
    rows = make_rows(3, 192)
    assert torch.equal(linear(rows), torch_linear(rows, weight, bias))


def test_another_type_than_fp32_is_not_packed():
    weight = make_weight(96, 64)[0].bfloat16()
    linear, *reasons = choose(OPERATORS, weight, load_kernels=need_kernels)
    assert linear.name == "plain"
    assert reasons == [["only fp32 on a CPU is packed, not torch.bfloat16 on cpu"]] * 2
    with pytest.raises(OneDnnUnavailableError, match="bfloat16"):
        pack(weight)


@pytest.mark.parametrize("num_rows", [0, 1, 7, 200])
def test_norm_and_gate_come_before_the_product(num_rows, make_linear):
    linear, norm = make_linear(*make_weight(96, 67)), Norm(weight=torch.linspace(0.5, 2, 67), eps=1e-5)
    hidden, delta, gate_up = make_rows(num_rows, 67), make_rows(num_rows, 67) * 2, make_rows(num_rows, 134)
    total = hidden + delta
    gate, up = gate_up.chunk(2, dim=1)
    expected = linear(rms_norm(total, norm.weight, norm.eps))
    torch.testing.assert_close(linear.after_norm(hidden, delta, norm), expected)
    assert torch.equal(hidden, total), "the sum stays in place"
    torch.testing.assert_close(linear.after_norm(hidden, None, norm), expected)
    assert torch.equal(hidden, total)
    torch.testing.assert_close(linear.after_gate(gate_up), linear(silu(gate) * up), rtol=1e-5, atol=1e-4)
