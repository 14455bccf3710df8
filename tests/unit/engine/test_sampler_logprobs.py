"""Log probabilities are of the model's own distribution, exact in 32 bits, for the rows that ask."""

import math

import numpy as np
import pytest
import torch

from gpu_worker.engine.sampler import Sampler
from tests.support.sampling import request

pytestmark = pytest.mark.usefixtures("each_row_sampler")


def random_logits(num_rows, vocab_size, *, scale=4.0):
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * scale


@pytest.mark.parametrize("vocab_size", [3, 32, 1000, 33001])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_log_probabilities_are_those_of_log_softmax(vocab_size, num_top):
    logits = random_logits(6, vocab_size)
    requests = [request(sequence_id=str(row), seed=row, logprobs=num_top) for row in range(6)]
    expected = logits.double().log_softmax(-1)
    for row, outcome in enumerate(Sampler().sample(logits, requests)):
        assert outcome.logprob.logprob == pytest.approx(float(expected[row, outcome.token_id]), abs=1e-6)
        largest = expected[row].topk(min(num_top, vocab_size))
        assert [token for token, _ in outcome.logprob.top] == largest.indices.tolist()
        assert [value for _, value in outcome.logprob.top] == pytest.approx(largest.values.tolist(), abs=1e-6)


def test_only_rows_that_ask_have_log_probabilities():
    requests = [request(sequence_id=str(row), logprobs=[None, 2, 0][row]) for row in range(3)]
    without, with_two, with_none = Sampler().sample(random_logits(3, 50), requests)
    assert without.logprob is None
    assert len(with_two.logprob.top) == 2
    assert with_none.logprob.top == ()


def test_values_are_exact_in_32_bits_and_never_above_zero():
    logits = random_logits(20, 500)
    logits[3] = 0
    logits[3, 7] = 200.0
    requests = [request(sequence_id=str(row), seed=row, logprobs=20) for row in range(20)]
    for outcome in Sampler().sample(logits, requests):
        for value in (outcome.logprob.logprob, *(value for _, value in outcome.logprob.top)):
            assert value == float(np.float32(value))
            assert value <= 0


def test_equals_are_in_id_order():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0, 2.0]])
    (outcome,) = Sampler().sample(logits, [request(temperature=0, logprobs=5)])
    assert [token for token, _ in outcome.logprob.top] == [1, 3, 6, 2, 4]


def test_many_equals_at_the_limit_give_the_smallest_ids():
    (outcome,) = Sampler().sample(torch.zeros(1, 1000), [request(temperature=0, logprobs=20)])
    assert [token for token, _ in outcome.logprob.top] == list(range(20))
    assert outcome.logprob.logprob == pytest.approx(-math.log(1000), abs=1e-6)


def test_nothing_that_changes_the_draw_changes_the_log_probabilities():
    logits = random_logits(1, 100)
    plain = Sampler().sample(logits, [request(temperature=0, logprobs=8)])[0].logprob
    best = plain.top[0][0]
    changed = request(
        temperature=0.3,
        top_k=3,
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=1.0,
        logit_bias=((5, 50.0),),
        banned={best},
        prompt=[1, 2, 3],
        output=[4, 5],
        logprobs=8,
    )
    (outcome,) = Sampler().sample(logits, [changed])
    assert outcome.token_id == 5
    assert outcome.logprob.top == plain.top
    assert outcome.logprob.logprob == pytest.approx(float(logits.double().log_softmax(-1)[0, 5]), abs=1e-6)


def test_a_token_below_all_of_top_has_its_own_log_probability():
    logits = torch.tensor([[5.0, 4.0, -30.0]])
    (outcome,) = Sampler().sample(logits, [request(temperature=0, logit_bias=((2, 100.0),), logprobs=1)])
    assert outcome.token_id == 2
    assert outcome.logprob.logprob == pytest.approx(float(logits.double().log_softmax(-1)[0, 2]), abs=2e-6)
    assert [token for token, _ in outcome.logprob.top] == [0]
