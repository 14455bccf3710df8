"""The sampling kernels alone: the same bits for a row in any batch and on any number of threads, and right sums."""

import math

import numpy as np
import pytest
import torch

from gpu_worker.kernels.sampling import SamplingKernels
from tests.support.paged_attention import need_kernels

DRAWS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.5, 0, 0.9999, 1e-6),
    (0.8, 0, 1.0, 0.05),
    (0.8, 50, 0.95, 0.0),
    (1.0, 400, 1.0, 0.01),
    (0.0, 0, 1.0, 0.0),
]


@pytest.fixture(autouse=True)
def _restore_threads():
    need_kernels()
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def kernels_on(logits):
    return SamplingKernels(need_kernels(), logits)


def make_rows(num_rows, vocab_size):
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    logits *= torch.tensor([0.1, 1.0, 3.0, 8.0])[torch.arange(num_rows) % 4, None]
    logits[::5] = logits[::5].round()
    return logits


def make_draws(num_rows):
    uniforms = np.random.default_rng(num_rows).random(num_rows)
    # Also both ends of the range.
    uniforms[:2] = 0, 1 - 2**-53
    return [(*DRAWS[row % len(DRAWS)], uniforms[row]) for row in range(num_rows)]


@pytest.mark.parametrize("k", [1, 2, 23, 24, 50, 128, 129, 700])
def test_the_k_largest_and_their_equals_can_be_drawn_and_no_other(k):
    """By the bounds of chunks, of groups and of the row, with equals at the border and without."""
    for logits in make_rows(16, 12001)[[1, 15]]:
        floor = logits.sort(descending=True).values[k - 1]
        expected = set((logits >= floor).nonzero().flatten().tolist())
        # At this temperature all weights are alike, so that equal steps of the uniform visit every candidate.
        uniforms = (np.arange(len(expected)) + 0.5) / len(expected)
        drawn = kernels_on(logits[None]).draw([0] * len(uniforms), [(1e6, k, 1.0, 0.0, value) for value in uniforms])
        assert sorted(drawn) == sorted(expected)


@pytest.mark.parametrize("vocab_size", [1, 97, 256, 1000, 5001])
def test_a_row_has_its_bits_alone_in_any_place_and_on_any_number_of_threads(vocab_size):
    logits, draws = make_rows(80, vocab_size), make_draws(80)
    limits = [min(row % 21, vocab_size) for row in range(80)]
    torch.set_num_threads(1)
    alone = [kernels_on(logits[row : row + 1]) for row in range(80)]
    best = [kernels.find_best()[0] for kernels in alone]
    tokens = [kernels.draw([0], [draw])[0] for kernels, draw in zip(alone, draws, strict=True)]
    measures = [kernels.measure([0], [limit]) for kernels, limit in zip(alone, limits, strict=True)]
    rows = np.random.default_rng(1).permutation(80).tolist()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        together = kernels_on(logits)
        assert together.find_best() == best
        assert together.draw(rows, [draws[row] for row in rows]) == [tokens[row] for row in rows]
        measured = together.measure(rows, [limits[row] for row in rows])
        for place, row in enumerate(rows):
            assert measured.log_totals[place] == measures[row].log_totals[0]
            assert np.array_equal(measured.token_ids[place, : limits[row]], measures[row].token_ids[0])
            assert np.array_equal(measured.logits[place, : limits[row]], measures[row].logits[0])


@pytest.mark.parametrize("vocab_size", [1, 8, 255, 257, 5001, 12001])
def test_measures_are_the_largest_logits_and_the_exact_total_in_32_bits(vocab_size):
    logits = make_rows(40, vocab_size)
    measured = kernels_on(logits).measure(range(40), [min(20, vocab_size)] * 40)
    np.testing.assert_allclose(measured.log_totals, logits.double().logsumexp(-1), rtol=0, atol=3e-8)
    for row, values in enumerate(logits.numpy()):
        expected = np.lexsort((np.arange(vocab_size), -values))[:20]
        assert measured.token_ids[row].tolist() == expected.tolist()
        assert np.array_equal(measured.logits[row], values[expected])


def test_tokens_far_from_the_largest_are_weighed_as_exactly_as_near_ones():
    """One far token often enough that its weights decide the draw: their sum is right within 32 bits."""
    for away in (5.0, 20.0, 60.0, 86.0):
        logits = torch.full((1, 40001), -away)
        logits[0, 40000] = 0
        exact = math.log1p(40000 * math.exp(-away))
        assert kernels_on(logits).measure([0], [0]).log_totals[0] == pytest.approx(exact, rel=2e-7)
    temperature = 0.37
    share = 40000 * math.exp(-9.0 / temperature)
    logits[0, :40000] = -9.0
    border = share / (1 + share)
    draws = [(temperature, 0, 1.0, 0.0, border * (1 + delta)) for delta in (-4e-7, 4e-7)]
    drawn = kernels_on(logits).draw([0, 0], draws)
    assert drawn[0] < 40000
    assert drawn[1] == 40000


def test_the_mean_of_many_uniforms_is_the_distribution():
    logits = make_rows(4, 1000)[1:2]
    uniforms = (np.arange(20000) + 0.5) / 20000
    tokens = kernels_on(logits).draw([0] * 20000, [(1.0, 0, 1.0, 0.0, uniform) for uniform in uniforms])
    shares = np.bincount(tokens, minlength=1000) / 20000
    np.testing.assert_allclose(shares, logits[0].double().softmax(-1), atol=1.01 / 20000)


def test_a_uniform_at_a_border_belongs_to_the_token_behind_it():
    for fields in (DRAWS[0], DRAWS[4], DRAWS[5]):
        draws = [(*fields, uniform) for uniform in (0.0, 0.25, 0.5, 0.75)]
        assert kernels_on(torch.zeros(1, 4)).draw([0] * 4, draws) == [0, 1, 2, 3]
        assert kernels_on(torch.zeros(1, 1024)).draw([0] * 4, draws) == [0, 256, 512, 768]


@pytest.mark.parametrize("place", [0, 7, 255, 256, 999])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_has_no_best(place, bad):
    logits = make_rows(3, 1000)
    expected = logits.argmax(-1).tolist()
    logits[1, place] = bad
    assert kernels_on(logits).find_best() == [expected[0], -1, expected[2]]


@pytest.mark.parametrize("draw", DRAWS)
def test_banned_tokens_are_never_drawn(draw):
    logits = torch.zeros(1, 700)
    logits[0, :300] = -math.inf
    logits[0, 301:] = -math.inf
    assert kernels_on(logits).draw([0] * 3, [(*draw, uniform) for uniform in (0.0, 0.5, 1 - 2**-53)]) == [300] * 3


def test_a_row_without_any_token_is_a_mistake_of_the_caller():
    with pytest.raises(AssertionError, match="can be drawn"):
        kernels_on(torch.full((1, 9), -math.inf)).draw([0], [(*DRAWS[0], 0.5)])
