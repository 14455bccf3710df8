"""Every parameter against a slow and plain sampler, alone and mixed, and the order in which they act."""

import itertools

import numpy as np
import pytest
import torch

from gpu_worker.engine.execution import SampleFailure
from gpu_worker.engine.logit_edits import ALL_BANNED, OVERFLOW
from gpu_worker.engine.sampler import Sampler
from tests.support.sampling import expect, request

pytestmark = pytest.mark.usefixtures("each_row_sampler")

NUM_CASES = 60

FIELDS = {
    "temperature": lambda random: {"temperature": float(random.choice([0.2, 0.7, 1.0, 1.0, 1.6]))},
    "greedy": lambda random: {"temperature": 0.0},
    "top_k": lambda random: {"top_k": int(random.choice([1, 2, 7, 40, 150, 10000]))},
    "top_p": lambda random: {"top_p": float(random.choice([0.01, 0.3, 0.8, 0.95, 0.999]))},
    "min_p": lambda random: {"min_p": float(random.choice([0.001, 0.05, 0.3, 1.0]))},
    "repetition": lambda random: {"repetition_penalty": float(random.choice([0.5, 1.1, 2.0]))},
    "presence": lambda random: {"presence_penalty": float(random.choice([-1.0, 0.4, 2.0]))},
    "frequency": lambda random: {"frequency_penalty": float(random.choice([-0.5, 0.4, 2.0]))},
    "bias": lambda random: {
        "logit_bias": tuple((token, float(random.normal() * 5)) for token in sorted(random_tokens(random, 6)))
    },
    "banned": lambda random: {"banned": frozenset(random_tokens(random, 6))},
}


def random_tokens(random, count):
    return {int(token) for token in random.integers(0, 50, count)}


def random_request(random, names, *, sequence_id):
    """The named parameters at random, over a context with many repeated tokens."""
    fields = {}
    for name in names:
        fields |= FIELDS[name](random)
    output = [int(token) for token in random.integers(0, 20, random.integers(0, 30))]
    return request(
        sequence_id=sequence_id,
        prompt=[int(token) for token in random.integers(0, 50, random.integers(1, 30))],
        output=output,
        position=len(output) + 1,
        seed=int(random.integers(0, 1 << 62)),
        **fields,
    )


def random_row(random, vocab_size):
    """Steep or flat, and sometimes with many equals."""
    row = random.normal(size=vocab_size) * random.choice([0.5, 2.0, 6.0])
    return np.round(row) if random.random() < 0.3 else row


def check(cases):
    """cases: (row, request), rows of equal length; all are drawn in one call."""
    logits = torch.tensor(np.array([row for row, _ in cases]), dtype=torch.float32)
    outcomes = Sampler().sample(logits, [asked for _, asked in cases])
    for row, (_, asked), outcome in zip(logits.numpy(), cases, outcomes, strict=True):
        assert outcome.token_id in expect(row, asked).acceptable, asked


@pytest.mark.parametrize("name", FIELDS)
def test_a_parameter_alone_draws_what_the_plain_sampler_draws(name):
    random = np.random.default_rng(list(FIELDS).index(name))
    check([(random_row(random, 200), random_request(random, [name], sequence_id=str(case))) for case in range(15)])


@pytest.mark.parametrize("vocab_size", [51, 96, 257, 400])
def test_mixed_parameters_draw_what_the_plain_sampler_draws(vocab_size):
    random = np.random.default_rng(vocab_size)
    cases = []
    for case in range(NUM_CASES):
        names = [name for name in FIELDS if random.random() < (0.1 if name == "greedy" else 0.5)]
        cases.append((random_row(random, vocab_size), random_request(random, names, sequence_id=str(case))))
    check(cases)


def drawn_tokens(logits, num_draws=200, **fields):
    """Which tokens come from so many seeds."""
    rows = torch.tensor(logits, dtype=torch.float32).repeat(num_draws, 1)
    requests = [request(sequence_id=str(seed), seed=seed, **fields) for seed in range(num_draws)]
    return {outcome.token_id for outcome in Sampler().sample(rows, requests)}


def logs(*probabilities):
    return [float(np.log(probability)) for probability in probabilities]


def test_a_bias_counts_before_the_repetition_penalty():
    """(1 + 3) / 2 is below 2.7, and 1 / 2 + 3 would be above."""
    assert drawn_tokens([1.0, 2.7], 1, temperature=0, logit_bias=((0, 3.0),), repetition_penalty=2.0, prompt=[0]) == {1}


def test_the_repetition_penalty_multiplies_what_is_negative_and_divides_what_is_positive():
    penalty = {"temperature": 0, "repetition_penalty": 2.0, "prompt": [0]}
    assert drawn_tokens([-1.0, -1.5], 1, **penalty) == {1}
    assert drawn_tokens([-1.0, -2.5], 1, **penalty) == {0}
    assert drawn_tokens([3.0, 1.6], 1, **penalty) == {1}


def test_repetition_counts_before_presence():
    """4 / 2 - 1 is above 0.8, and (4 - 1) / 2 would be above 1.2."""
    fields = {"temperature": 0, "repetition_penalty": 2.0, "presence_penalty": 1.0, "prompt": [2], "output": [0]}
    assert drawn_tokens([4.0, 0.8, -9.0], 1, **fields) == {0}
    assert drawn_tokens([4.0, 1.2, -9.0], 1, **fields) == {1}


def test_presence_and_frequency_do_not_count_the_prompt_and_repetition_does():
    logits = [1.0, 0.5]
    for penalty in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}):
        assert drawn_tokens(logits, 1, temperature=0, prompt=[0, 0], **penalty) == {0}
        assert drawn_tokens(logits, 1, temperature=0, prompt=[1], output=[0], **penalty) == {1}
    assert drawn_tokens(logits, 1, temperature=0, prompt=[0], repetition_penalty=3.0) == {1}


def test_frequency_counts_every_occurrence_and_presence_one():
    output = [0, 0, 0]
    assert drawn_tokens([1.0, 0.5], 1, temperature=0, output=output, presence_penalty=0.4) == {0}
    assert drawn_tokens([1.0, 0.5], 1, temperature=0, output=output, frequency_penalty=0.4) == {1}


def test_penalties_count_before_the_temperature():
    """A penalty of 1 leaves exp(-2) at temperature 0.5; after the temperature it would leave exp(-1), above min-p."""
    fields = {"temperature": 0.5, "min_p": 0.2, "presence_penalty": 1.0, "prompt": [1], "output": [0]}
    assert drawn_tokens([0.0, 0.0], **fields) == {1}


def test_the_temperature_counts_before_top_p_and_before_min_p():
    assert drawn_tokens(logs(0.5, 0.3, 0.2), temperature=0.5, top_p=0.6) == {0}
    assert drawn_tokens(logs(0.5, 0.25, 0.25), temperature=0.5, min_p=0.4) == {0}


def test_top_k_counts_before_top_p():
    """Of 0.4, 0.3 the first has more than half; of all four it has not."""
    assert drawn_tokens(logs(0.4, 0.3, 0.2, 0.1), top_k=2, top_p=0.5) == {0}


def test_top_p_counts_before_min_p():
    """0.4 alone does not reach 0.55 of everything; of what min-p leaves it would."""
    assert drawn_tokens(logs(0.4, 0.3, 0.2, 0.1), top_p=0.55, min_p=0.6) == {0, 1}
    assert drawn_tokens(logs(0.4, 0.3, 0.2, 0.1), top_p=0.9, min_p=0.6, top_k=4) == {0, 1}


def test_min_p_compares_with_the_most_probable_token():
    assert drawn_tokens(logs(0.4, 0.25, 0.19, 0.16), 500, min_p=0.45) == {0, 1, 2}
    assert drawn_tokens(logs(0.4, 0.4, 0.2), min_p=1.0) == {0, 1}


def test_a_nucleus_may_end_among_very_many_tokens_of_very_small_probability():
    """0.7 for one token; 0.18 over 20,000 odd ones, which reach 0.85; 0.12 over 20,000 even ones, which it leaves out."""
    logits = np.log(np.where(np.arange(40001) % 2 == 1, 0.18 / 20000, 0.12 / 20000))
    logits[0] = np.log(0.7)
    tokens = drawn_tokens(logits.tolist(), 60, top_p=0.85)
    assert 0 in tokens
    assert len(tokens) > 5
    assert all(token % 2 == 1 for token in tokens - {0})


def test_equals_of_the_last_one_kept_stay():
    assert drawn_tokens([1.0, 0.0, 0.0, -1.0], 500, top_k=2) == {0, 1, 2}
    assert drawn_tokens(logs(0.4, 0.2, 0.2, 0.2), 500, top_p=0.5) == {0, 1, 2, 3}
    assert drawn_tokens(logs(0.4, 0.2, 0.2, 0.2), 500, top_p=0.5, top_k=2) == {0, 1, 2, 3}


def test_banned_tokens_are_never_drawn_and_take_no_place_in_top_k():
    logits = [9.0, 3.0, 2.0]
    assert drawn_tokens(logits, 1, temperature=0, banned={0}) == {1}
    assert drawn_tokens(logits, temperature=5.0, banned={0}) == {1, 2}
    assert drawn_tokens(logits, top_k=1, banned={0, 1}) == {2}
    assert drawn_tokens(logits, top_k=2, banned={0, 1}) == {2}


def test_no_bias_and_no_penalty_brings_a_banned_token_back():
    fields = {"logit_bias": ((0, 100.0),), "presence_penalty": -2.0, "repetition_penalty": 0.5, "output": [0]}
    for temperature, top_k in itertools.product([0.0, 1.0], [0, 1]):
        tokens = drawn_tokens([5.0, 0.0], temperature=temperature, top_k=top_k, banned={0}, **fields)
        assert tokens == {1}


def test_a_ban_of_a_token_that_the_model_does_not_have_changes_nothing():
    assert drawn_tokens([1.0, 0.0], 1, temperature=0, banned={2, 1 << 40}) == {0}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"banned": {0, 1, 2}}, ALL_BANNED),
        ({"logit_bias": ((3, 1.0),)}, "logit_bias: token 3 is outside the vocabulary of 3"),
        ({"repetition_penalty": 1e-40, "prompt": [1]}, OVERFLOW),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_leaves_nothing_to_draw_fails_with_its_reason_and_alone(fields, reason, temperature):
    logits = torch.tensor([[1.0, 2.0, 3.0]] * 3)
    before = logits.clone()
    others = [request(sequence_id=name, temperature=0) for name in "ab"]
    broken = request(sequence_id="broken", temperature=temperature, **fields)
    outcomes = Sampler().sample(logits, [others[0], broken, others[1]])
    assert outcomes[1] == SampleFailure(reason=reason, is_suspect=False)
    assert [outcomes[0].token_id, outcomes[2].token_id] == [2, 2]
    assert torch.equal(logits, before)
