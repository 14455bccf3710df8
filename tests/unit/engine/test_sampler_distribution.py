"""The joint distribution of short sequences from a toy model, and that the test would see a broken sampler."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from gpu_worker.engine import draws, sampler
from gpu_worker.engine.execution import SampleRequest
from gpu_worker.engine.sampler import Sampler, uniform
from service_kit.sampling import SamplingParams
from tests.support.chi_square import p_value, survival
from tests.support.sampling import edited_logits, expected_probabilities, request

VOCAB_SIZE = 8
LENGTH = 3
SAMPLING = {
    "temperature": 0.9,
    "top_k": 7,
    "top_p": 0.9,
    "min_p": 0.02,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
}
TABLE = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(5))
"""Logits of the next token by the previous one."""


def draw_sequences(num_sequences):
    """How often each output came, one sequence per seed; all sequences share the steps, as in a batch."""
    engine = Sampler()
    contexts = [[0] for _ in range(num_sequences)]
    samplings = [SamplingParams(max_output_tokens=LENGTH, seed=seed, **SAMPLING) for seed in range(num_sequences)]
    for position in range(1, LENGTH + 1):
        requests = [
            SampleRequest(
                sequence_id=str(row),
                sampling=samplings[row],
                position=position,
                token_ids=context,
                num_prompt_tokens=1,
            )
            for row, context in enumerate(contexts)
        ]
        logits = TABLE[torch.tensor([context[-1] for context in contexts])]
        for context, outcome in zip(contexts, engine.sample(logits, requests), strict=True):
            context.append(outcome.token_id)
    return Counter(tuple(context[1:]) for context in contexts)


def exact_probabilities():
    """Of every output, by the plain reference."""
    probabilities = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for output, probability in probabilities.items():
            asked = request(prompt=(0,), output=output, **SAMPLING)
            logits = edited_logits(TABLE[asked.token_ids[-1]], asked)
            for token, share in expected_probabilities(logits, asked.sampling, top_p=asked.sampling.top_p).items():
                longer[(*output, token)] = probability * share
        probabilities = longer
    return probabilities


@pytest.mark.parametrize(
    ("statistic", "degrees", "probability"),
    [(3.841, 1, 0.05), (43.82, 19, 0.001), (11.07, 5, 0.05), (124.342, 100, 0.05), (77.929, 100, 0.95), (0.0, 3, 1.0)],
)
def test_the_chi_square_survival_function_gives_the_values_of_the_tables(statistic, degrees, probability):
    assert survival(statistic, degrees) == pytest.approx(probability, rel=2e-3)


def test_sequences_of_many_seeds_follow_the_joint_distribution():
    assert p_value(draw_sequences(20000), exact_probabilities()) > 0.001


def test_a_uniform_that_ignores_the_position_would_be_seen(monkeypatch):
    monkeypatch.setattr(sampler, "uniform", lambda seed, position: uniform(seed, 1))
    assert p_value(draw_sequences(1500), exact_probabilities()) < 1e-6


def test_a_uniform_that_ignores_the_seed_would_be_seen(monkeypatch):
    monkeypatch.setattr(sampler, "uniform", lambda seed, position: uniform(seed // 4, position))
    assert p_value(draw_sequences(1500), exact_probabilities()) < 1e-6


@pytest.mark.usefixtures("without_sampling_kernels")
@pytest.mark.parametrize("offset", [-1, 1])
def test_a_nucleus_off_by_one_would_be_seen(monkeypatch, offset):
    right = draws._top_p_floors

    def off_by_one(descending, weights, rows):
        floors = right(descending, weights, rows)
        places = (descending > floors).sum(axis=1, keepdims=True) + offset
        return np.take_along_axis(descending, np.clip(places, 0, descending.shape[1] - 1), axis=1)

    monkeypatch.setattr(draws, "_top_p_floors", off_by_one)
    assert p_value(draw_sequences(1500), exact_probabilities()) < 1e-6


def test_the_exact_probabilities_are_a_distribution_that_leaves_some_outputs_out():
    probabilities = exact_probabilities()
    assert sum(probabilities.values()) == pytest.approx(1)
    assert 20 < len(probabilities) < len(list(itertools.product(range(VOCAB_SIZE), repeat=LENGTH)))
