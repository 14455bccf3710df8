"""The compiled kernels and numpy draw the same tokens, but where a uniform is at a token's border."""

import math

import numpy as np
import pytest
import torch

from gpu_worker.engine.fused_rows import FusedRows
from gpu_worker.engine.plain_rows import PlainRows
from gpu_worker.engine.row_sampler import make_row_sampler
from gpu_worker.engine.sampler import Sampler
from tests.support.paged_attention import need_kernels
from tests.support.sampling import expect, request

BORDER = 2e-6
"""A share of the distribution: as far as the two may be apart."""


@pytest.fixture(autouse=True)
def _kernels():
    need_kernels()


def sample_both(logits, requests):
    return Sampler().sample(logits, requests), Sampler(make_rows=PlainRows).sample(logits, requests)


def random_requests(num_rows, vocab_size, random):
    """All parameters, each in its range and often off."""

    def choose(off, low, high, *, share=0.5):
        return float(random.uniform(low, high)) if random.random() < share else off

    return [
        request(
            sequence_id=str(row),
            seed=int(random.integers(1 << 62)),
            position=int(random.integers(1, 1000)),
            prompt=random.integers(vocab_size, size=20).tolist(),
            output=random.integers(vocab_size, size=30).tolist(),
            banned=frozenset(random.integers(vocab_size, size=3).tolist()) if random.random() < 0.2 else frozenset(),
            temperature=choose(1.0, 0.05, 2.0, share=0.7),
            top_k=int(choose(random.integers(60) * (row % 2), 1, vocab_size, share=0.2)),
            top_p=choose(1.0, 0.01, 1.0),
            min_p=choose(0.0, 0.0, 0.3, share=0.3),
            repetition_penalty=choose(1.0, 0.8, 1.5, share=0.2),
            presence_penalty=choose(0.0, -1.0, 1.0, share=0.2),
            frequency_penalty=choose(0.0, -1.0, 1.0, share=0.2),
            logit_bias=((int(random.integers(vocab_size)), 3.0),) if random.random() < 0.2 else (),
        )
        for row in range(num_rows)
    ]


def test_there_are_two_paths():
    assert isinstance(make_row_sampler(torch.zeros(1, 3)), FusedRows)
    assert isinstance(make_row_sampler(torch.zeros(1, 3, dtype=torch.float64)), PlainRows)


@pytest.mark.parametrize(("vocab_size", "num_rows"), [(97, 1500), (515, 2000), (1000, 1000), (3001, 500)])
def test_both_draw_the_same_token_but_at_a_border(vocab_size, num_rows):
    random = np.random.default_rng(vocab_size)
    scales = random.choice([0.3, 1.0, 3.0, 6.0], (num_rows, 1))
    logits = torch.from_numpy((random.standard_normal((num_rows, vocab_size)) * scales).astype(np.float32))
    logits[::7] = logits[::7].round()
    requests = random_requests(num_rows, vocab_size, random)
    others = [
        row
        for row, (fused, plain) in enumerate(zip(*sample_both(logits, requests), strict=True))
        if fused.token_id != plain.token_id
    ]
    assert len(others) <= num_rows / 200
    for row in others:
        fused, plain = sample_both(logits[row : row + 1], [requests[row]])
        acceptable = expect(logits[row].numpy(), requests[row], slack=BORDER).acceptable
        assert {fused[0].token_id, plain[0].token_id} <= acceptable


def test_both_measure_the_same_distribution():
    logits = torch.randn(200, 1000, generator=torch.Generator().manual_seed(1)) * 4
    logits[::3] = logits[::3].round()
    requests = [request(seed=row, temperature=row % 2, top_k=1, logprobs=row % 21) for row in range(200)]
    for fused, plain in zip(*sample_both(logits, requests), strict=True):
        assert fused.token_id == plain.token_id
        assert [token for token, _ in fused.logprob.top] == [token for token, _ in plain.logprob.top]
        values = [[entry.logprob, *(value for _, value in entry.top)] for entry in (fused.logprob, plain.logprob)]
        np.testing.assert_allclose(*values, rtol=2e-7, atol=5e-7)


@pytest.mark.parametrize("vocab_size", [1, 5, 255, 256, 257, 2500])
def test_both_fail_the_same_rows_and_find_the_first_of_equals(vocab_size):
    logits = torch.randn(60, vocab_size, generator=torch.Generator().manual_seed(1)).round()
    for row, bad in enumerate([math.nan, math.inf, -math.inf] * 5):
        logits[row, (row * 37) % vocab_size] = bad
    logits[20] = 3e38
    logits[21] = -3e38
    fused, plain = sample_both(logits, [request(temperature=0)] * 60)
    assert fused == plain
    assert [hasattr(outcome, "reason") for outcome in fused] == [True] * 15 + [False] * 45


@pytest.mark.parametrize(
    "fields", [{}, {"top_p": 0.5}, {"min_p": 0.2}, {"top_k": 2}, {"top_k": 150, "logprobs": 20}, {"logprobs": 3}]
)
def test_logits_at_the_ends_of_their_range_give_tokens_in_both(fields):
    logits = torch.zeros(8, 300)
    logits[0] = 3e38
    logits[1, ::2] = -3e38
    logits[2, ::2], logits[2, 1::2] = 3e38, -3e38
    logits[3] = -3e38
    logits[4, 7] = 3e38
    logits[5] = torch.arange(300) * 1e-40
    logits[6] = torch.arange(300) * 1e36
    logits[7, 299] = 1e-45
    for temperature in (1e-30, 1.0, 2.0):
        requests = [request(seed=seed, temperature=temperature, **fields) for seed in range(8)]
        fused, plain = sample_both(logits, requests)
        assert [outcome.token_id for outcome in fused] == [outcome.token_id for outcome in plain]
