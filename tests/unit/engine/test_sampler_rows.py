"""Rows do not influence each other, and what is remembered of a sequence never changes a result."""

from collections import Counter

import numpy as np
import pytest
import torch

from gpu_worker.engine.penalties import TokenCounts
from gpu_worker.engine.plain_rows import PlainRows
from gpu_worker.engine.sampler import Sampler
from tests.support.sampling import request

pytestmark = pytest.mark.usefixtures("each_row_sampler")

PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3}

KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.0, **PENALTIES, "logprobs": 3},
    {"temperature": 0.8},
    {"temperature": 1.3, "logprobs": 0},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.95, **PENALTIES},
    {"temperature": 1.0, "top_k": 7, "logprobs": 20},
    {"temperature": 1.0, "top_k": 400},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 3.0, "top_p": 0.9999, "min_p": 1e-6},
    {"temperature": 1.0, "min_p": 0.1, "logit_bias": ((3, 5.0), (40, -100.0))},
    {"temperature": 0.5, "top_p": 0.5, "banned": frozenset({1, 2, 3}), "logprobs": 5},
    {"temperature": 1e-3},
]


def mixed_requests(num_rows, *, seed=0):
    """All kinds in turn, over contexts of different lengths."""
    random = np.random.default_rng(seed)
    return [
        request(
            sequence_id=f"s{row}",
            seed=row * 7919,
            position=row + 1,
            prompt=random.integers(0, 50, row % 9 + 1).tolist(),
            output=random.integers(0, 50, row).tolist(),
            **KINDS[row % len(KINDS)],
        )
        for row in range(num_rows)
    ]


def mixed_logits(num_rows, vocab_size, *, seed=0):
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))
    # Flat, steep, and full of equals.
    scales = torch.tensor([0.1, 1.0, 3.0, 8.0])[torch.arange(num_rows) % 4, None]
    logits *= scales
    logits[::5] = logits[::5].round()
    return logits


@pytest.mark.parametrize(("vocab_size", "num_rows"), [(97, 120), (1000, 120), (3001, 60), (33001, 24)])
def test_a_row_has_the_same_result_alone_in_any_subset_and_in_any_order(vocab_size, num_rows):
    requests = mixed_requests(num_rows)
    logits = mixed_logits(num_rows, vocab_size)
    together = Sampler().sample(logits, requests)
    assert [Sampler().sample(logits[row : row + 1], [requests[row]])[0] for row in range(num_rows)] == together
    assert Sampler().sample(logits.flip(0), requests[::-1]) == together[::-1]
    random = np.random.default_rng(vocab_size)
    for size in (2, 3, 7, 17):
        rows = random.choice(num_rows, size, replace=False)
        assert Sampler().sample(logits[rows], [requests[row] for row in rows]) == [together[row] for row in rows]


def test_a_row_among_rows_of_its_own_kind_has_the_result_it_has_among_all_kinds():
    num_rows = 5 * len(KINDS)
    requests = mixed_requests(num_rows)
    logits = mixed_logits(num_rows, 500)
    together = Sampler().sample(logits, requests)
    for kind in range(len(KINDS)):
        rows = list(range(kind, num_rows, len(KINDS)))
        assert Sampler().sample(logits[rows], [requests[row] for row in rows]) == [together[row] for row in rows]


def test_the_number_of_threads_changes_nothing():
    requests = mixed_requests(24)
    logits = mixed_logits(24, 33000)
    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            results.append(Sampler().sample(logits, requests))
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1] == results[2]


def test_rows_that_are_a_strided_view_have_the_results_of_a_copy():
    requests = mixed_requests(12)
    wide = mixed_logits(12, 600)
    assert Sampler().sample(wide[:, ::2], requests) == Sampler().sample(wide[:, ::2].clone(), requests)


def test_no_rows_give_no_results():
    assert Sampler().sample(torch.zeros(0, 10), []) == []


def test_a_remembered_sequence_draws_what_a_new_one_draws_at_every_length():
    """100 different tokens and many repeated ones: the remembered counts outgrow their first room."""
    remembering = Sampler()
    asked = request(prompt=[5, 5, 6], temperature=0.9, top_k=150, seed=3, **PENALTIES)
    logits = mixed_logits(160, 200, seed=9) * 0.1
    for position, row in enumerate(logits, start=1):
        now = request(
            position=position,
            prompt=[5, 5, 6],
            output=asked.token_ids[3:],
            temperature=0.9,
            top_k=150,
            seed=3,
            **PENALTIES,
        )
        (outcome,) = remembering.sample(row[None], [now])
        assert outcome == Sampler().sample(row[None], [now])[0]
        asked.token_ids.append(outcome.token_id)
    assert len(set(asked.token_ids)) > 64
    assert len(asked.token_ids) > len(set(asked.token_ids))


def test_asking_twice_for_a_position_counts_nothing_twice():
    sampler = Sampler()
    asked = request(temperature=0, output=[0], presence_penalty=1.0, frequency_penalty=1.0)
    logits = torch.tensor([[2.5, 0.0]])
    assert [sampler.sample(logits, [asked])[0].token_id for _ in range(3)] == [0, 0, 0]


def test_a_forgotten_sequence_goes_on_as_before():
    sampler = Sampler()
    asked = request(temperature=0, prompt=[1], output=[0, 0], frequency_penalty=1.0)
    logits = torch.tensor([[3.5, 1.0]])
    assert sampler.sample(logits, [asked])[0].token_id == 0
    sampler.forget("s")
    asked.token_ids.append(0)
    assert sampler.sample(logits, [asked])[0].token_id == 1


def test_only_sequences_with_penalties_or_biases_are_remembered_until_they_are_forgotten():
    sampler = Sampler()
    requests = [
        request(sequence_id="greedy", temperature=0),
        request(sequence_id="penalised", presence_penalty=1.0),
        request(sequence_id="biased", logit_bias=((0, 1.0),)),
    ]
    sampler.sample(torch.zeros(3, 10), requests)
    assert sampler.num_remembered == 2
    for sequence_id in ("greedy", "penalised", "biased", "unknown"):
        sampler.forget(sequence_id)
    assert sampler.num_remembered == 0


def test_an_id_that_comes_back_with_other_parameters_starts_anew():
    sampler = Sampler()
    logits = torch.tensor([[1.0, 0.0]])
    assert sampler.sample(logits, [request(temperature=0, output=[0], presence_penalty=2.0)])[0].token_id == 1
    assert sampler.sample(logits, [request(temperature=0, output=[0], presence_penalty=0.5)])[0].token_id == 0


def test_a_sequence_that_became_shorter_is_a_mistake_of_the_caller():
    sampler = Sampler()
    sampler.sample(torch.zeros(1, 10), [request(output=[1, 2], presence_penalty=1.0)])
    with pytest.raises(AssertionError, match="only grows"):
        sampler.sample(torch.zeros(1, 10), [request(output=[1], presence_penalty=1.0)])


def test_logits_are_as_they_were_when_sampling_raises():
    sampler = Sampler()
    sampler.sample(torch.zeros(1, 10), [request(output=[1, 2], presence_penalty=1.0)])
    logits = mixed_logits(2, 10)
    before = logits.clone()
    with pytest.raises(AssertionError, match="only grows"):
        sampler.sample(
            logits,
            [request(sequence_id="other", logit_bias=((1, 5.0),)), request(output=[1], presence_penalty=1.0)],
        )
    assert torch.equal(logits, before)


@pytest.mark.parametrize("with_prompt", [True, False])
def test_counts_hold_each_token_once_with_its_occurrences_in_the_output(with_prompt):
    tokens = [7, 8, 7, 9, 8, 9, 9]
    counts = TokenCounts(token_ids=tokens[:4], num_prompt_tokens=3, with_prompt=with_prompt)
    counts.extend(tokens)
    held = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert held == ({7: 0, 8: 1, 9: 3} if with_prompt else {8: 1, 9: 3})


def test_counts_are_right_when_a_sequence_has_far_more_tokens_than_at_first():
    tokens = np.random.default_rng(0).integers(0, 400, 1000).tolist()
    counts = TokenCounts(token_ids=tokens[:10], num_prompt_tokens=10, with_prompt=True)
    for length in (11, 90, 500, 1000):
        counts.extend(tokens[:length])
        occurrences = Counter(tokens[10:length])
        held = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
        assert held == {token: occurrences[token] for token in tokens[:length]}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_gives_the_results_of_the_cpu():
    requests = mixed_requests(120)
    logits = mixed_logits(120, 3001)
    on_device = Sampler().sample(logits.cuda(), requests)
    assert on_device == Sampler(make_rows=PlainRows).sample(logits, requests)
    assert [outcome.token_id for outcome in on_device] == [
        outcome.token_id for outcome in Sampler().sample(logits, requests)
    ]
