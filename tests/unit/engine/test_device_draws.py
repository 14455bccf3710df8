"""Tokens drawn on the device are those of the host's sampler."""

import numpy as np
import pytest
import torch

from gpu_worker.engine.device_draws import DrawKind, draw_rows, draw_sections, kind_of, read_sections
from gpu_worker.engine.draws import Draw
from gpu_worker.engine.plain_rows import PlainRows

VOCAB = 300


def draw(uniform=0.0, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return Draw(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, uniform=uniform)


def on_device(logits, draws, num_rows=None):
    numbers, top_k = (torch.from_numpy(section) for section in draw_sections(draws, num_rows or len(draws)))
    return draw_rows(logits, read_sections(numbers, top_k), kind_of(draws)).tolist()


def logits_of(seed, num_rows, *, are_equal=False):
    logits = torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    return (logits * 2).round() / 2 if are_equal else logits


@pytest.mark.parametrize("are_equal", [False, True], ids=["distinct", "many equal"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.3},
        {"top_k": 5},
        {"top_k": 40, "top_p": 0.8},
        {"top_p": 0.5, "temperature": 2.0},
        {"min_p": 0.2},
        {"top_k": 9, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 0.0},
    ],
    ids=str,
)
def test_every_uniform_draws_the_token_of_the_host(fields, are_equal):
    uniforms = np.linspace(0, 1, 61, endpoint=False) + 0.0037
    draws = [draw(uniform=float(uniform), **fields) for uniform in uniforms]
    logits = logits_of(1, 1, are_equal=are_equal).repeat(len(draws), 1)
    expected = PlainRows(logits).choose(dict(enumerate(draws)), ())
    assert on_device(logits, draws) == [expected[row] for row in range(len(draws))]


def test_rows_of_all_kinds_stand_beside_each_other_and_padding_is_greedy():
    draws = [draw(0.4, top_k=3), draw(temperature=0.0), draw(0.9), draw(0.7, top_p=0.3)]
    logits = logits_of(2, 6)
    expected = PlainRows(logits[:4]).choose(dict(enumerate(draws)), ())
    found = on_device(logits, draws, num_rows=6)
    assert found[:4] == [expected[row] for row in range(4)]
    assert found[4:] == logits[4:].argmax(-1).tolist()


def test_a_row_that_is_not_finite_is_told_and_touches_no_other():
    logits = logits_of(3, 4)
    logits[0, 7], logits[2, 9] = torch.nan, torch.inf
    draws = [draw(0.5, top_p=0.9)] * 4
    expected = PlainRows(logits[[1, 3]]).choose(dict(enumerate(draws[:2])), ())
    assert on_device(logits, draws) == [-1, expected[0], -1, expected[1]]


def test_the_kind_is_what_the_most_demanding_row_needs():
    assert kind_of([]) is DrawKind.GREEDY
    assert kind_of([draw(temperature=0.0, top_k=4)]) is DrawKind.GREEDY
    assert kind_of([draw(temperature=0.0), draw()]) is DrawKind.WHOLE
    assert kind_of([draw(), draw(min_p=0.1)]) is DrawKind.LIMITED
