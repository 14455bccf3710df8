import math
from collections import Counter

import pytest
import torch

from gpu_worker.engine.execution import NOT_FINITE, SampleFailure
from gpu_worker.engine.sampler import Sampler, uniform
from tests.support.sampling import request

pytestmark = pytest.mark.usefixtures("each_row_sampler")


def sample(logits, requests):
    """Token ids; None for a failure of the model's logits."""
    outcomes = Sampler().sample(logits, requests)
    assert all(outcome.reason == NOT_FINITE for outcome in outcomes if isinstance(outcome, SampleFailure))
    return [None if isinstance(outcome, SampleFailure) else outcome.token_id for outcome in outcomes]


def random_logits(num_rows, vocab_size=1000, seed=0):
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def draw_many(probabilities, num_draws, **fields):
    logits = torch.tensor(probabilities).log().clamp(min=-1e4).repeat(num_draws, 1)
    return Counter(sample(logits, [request(seed=seed, **fields) for seed in range(num_draws)]))


def test_the_uniform_of_a_seed_and_position_never_changes():
    """Recorded values: seeded outputs of stored generations depend on them."""
    assert [uniform(0, 1), uniform(1, 1), uniform(0, 2), uniform((1 << 63) - 1, 100000)] == [
        0.6524484863740322,
        0.36818951565166946,
        0.7012121095215252,
        0.4144092770963834,
    ]


def test_uniforms_are_uniform_over_seeds_and_over_positions():
    for values in (
        [uniform(seed, 1) for seed in range(20000)],
        [uniform(1, position) for position in range(1, 20001)],
    ):
        assert min(values) >= 0
        assert max(values) < 1
        counts = Counter(int(value * 20) for value in values)
        chi_square = sum((counts[cell] - 1000) ** 2 / 1000 for cell in range(20))
        assert chi_square < 43.8  # 99.9 % quantile of 19 degrees of freedom


def test_temperature_zero_takes_the_largest():
    logits = random_logits(5)
    assert sample(logits, [request(temperature=0)] * 5) == logits.argmax(-1).tolist()


def test_draws_follow_the_distribution():
    expected = [0.5, 0.0, 0.3, 0.2]
    counts = draw_many(expected, 4000)
    assert counts[1] == 0
    for token, probability in enumerate(expected):
        assert counts[token] / 4000 == pytest.approx(probability, abs=0.03)


def test_temperature_sharpens_the_distribution():
    counts = draw_many([0.6, 0.4], 4000, temperature=0.5)
    assert counts[0] / 4000 == pytest.approx(0.36 / (0.36 + 0.16), abs=0.03)


def test_a_tiny_temperature_is_greedy_and_does_not_overflow():
    logits = random_logits(4) * 100
    assert sample(logits, [request(temperature=1e-30)] * 4) == logits.argmax(-1).tolist()


def test_top_k_keeps_the_k_most_likely():
    counts = draw_many([0.1, 0.4, 0.2, 0.3], 4000, top_k=2)
    assert counts.keys() == {1, 3}
    assert counts[1] / 4000 == pytest.approx(4 / 7, abs=0.03)


def test_top_k_beyond_the_vocabulary_is_off():
    assert draw_many([0.5, 0.5], 100, top_k=1 << 20) == draw_many([0.5, 0.5], 100)


def test_top_p_keeps_the_fewest_tokens_that_reach_p():
    assert draw_many([0.15, 0.5, 0.3, 0.05], 2000, top_p=0.7).keys() == {1, 2}
    assert draw_many([0.15, 0.5, 0.3, 0.05], 2000, top_p=0.9).keys() == {0, 1, 2}
    assert draw_many([0.15, 0.5, 0.3, 0.05], 500, top_p=0.01).keys() == {1}


def test_top_p_counts_what_top_k_left():
    """Of 0.4, 0.3, 0.2, 0.1 top-k 2 leaves 4/7 and 3/7, so that p = 0.5 keeps one."""
    assert draw_many([0.2, 0.4, 0.3, 0.1], 500, top_k=2, top_p=0.5).keys() == {1}


def test_top_p_on_a_flat_distribution_is_exact_beyond_the_first_few_hundred():
    vocab_size = 2000
    logits = torch.arange(vocab_size, 0, -1).double().log().float().repeat(1000, 1)
    tokens = sample(logits, [request(top_p=0.9, seed=seed) for seed in range(1000)])
    total = vocab_size * (vocab_size + 1) / 2
    last = next(n for n in range(vocab_size) if (n + 1) * vocab_size - n * (n + 1) / 2 >= 0.9 * total)
    assert last > 512
    assert last * 0.97 < max(tokens) <= last + 1


def test_a_row_is_drawn_the_same_alone_and_beside_others():
    logits = random_logits(16)
    requests = [
        request(
            temperature=[0.0, 0.7, 1.0, 1.5][row % 4],
            top_k=[0, 5, 0][row % 3],
            top_p=[1.0, 0.8][row % 2],
            seed=row,
            position=row + 1,
        )
        for row in range(16)
    ]
    together = sample(logits, requests)
    assert together == [sample(logits[row : row + 1], [requests[row]])[0] for row in range(16)]
    assert sample(logits.flip(0), requests[::-1]) == together[::-1]


def test_other_positions_and_seeds_give_other_tokens():
    logits = torch.zeros(50, 1000)
    assert len(set(sample(logits, [request(position=position) for position in range(1, 51)]))) > 40
    assert len(set(sample(logits, [request(seed=seed) for seed in range(50)]))) > 40


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_has_no_token_and_harms_no_other(bad, temperature):
    logits = random_logits(3)
    expected = sample(logits, [request(temperature=temperature)] * 3)
    logits[1, 17] = bad
    assert sample(logits, [request(temperature=temperature)] * 3) == [expected[0], None, expected[2]]


def test_logits_are_left_as_they_were():
    logits = random_logits(3)
    before = logits.clone()
    sample(logits, [request(top_k=3, top_p=0.5, repetition_penalty=1.3, logit_bias=((4, 5.0),), banned={7})] * 3)
    assert torch.equal(logits, before)


def test_every_uniform_finds_a_token_of_positive_probability():
    """Probabilities at both ends of the vocabulary are zero; no rounding may reach them."""
    probabilities = [0.0] * 300 + [1e-7, 1 - 1e-7] + [0.0] * 300
    assert draw_many(probabilities, 3000).keys() <= {300, 301}


@pytest.mark.parametrize("vocab_size", [1, 255, 256, 257, 1000])
def test_a_draw_equals_the_inverse_of_a_plain_cumulative_sum(vocab_size):
    logits = random_logits(200, vocab_size)
    tokens = sample(logits, [request(seed=seed, position=3) for seed in range(200)])
    cumulative = logits.double().softmax(-1).cumsum(-1)
    for row, token in enumerate(tokens):
        value = uniform(row, 3)
        assert cumulative[row, token] > value - 1e-6
        assert token == 0 or cumulative[row, token - 1] <= value + 1e-6
