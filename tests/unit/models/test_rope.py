"""Fields of the rotary position embedding, and the frequencies that follow from them, against transformers by value."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gpu_worker.layers.rope_config import RopeConfig
from gpu_worker.layers.rope_frequencies import inverse_frequencies
from gpu_worker.models.config import UnsupportedModelError, parse_model_config
from tests.unit.models.test_model_config import BASE

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def parse(**fields):
    return parse_model_config({**BASE, **fields}).rope


def test_both_spellings_of_the_parameters_mean_the_same():
    new = parse(rope_parameters={"rope_theta": 5e5, **LLAMA3})
    assert new == RopeConfig(
        rope_type="llama3",
        theta=5e5,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_context_length=64,
    )
    assert parse(rope_theta=5e5, rope_scaling=LLAMA3) == new
    assert parse(rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3}) == new
    assert parse(rope_theta=5e5, rope_parameters=LLAMA3, rope_scaling=LLAMA3) == new
    assert parse() == RopeConfig(theta=1e4)
    assert parse(rope_theta=7e3, rope_scaling=None) == RopeConfig(theta=7e3)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_scaling.rope_type"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters.rope_type"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_parameters.rope_type"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.full_attention"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor"),
        ({"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "rope_parameters.factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor"),
        ({"rope_parameters": {**LLAMA3, "beta_fast": 32}}, "rope_parameters.beta_fast"),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": 4.0}}, "rope_parameters.high_freq_factor"),
        ({"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 0.5}}, "rope_parameters.original_max_position_embeddings"),
        ({"rope_parameters": {**YARN, "long_factor": [1.0]}}, "rope_parameters.long_factor"),
        ({"rope_parameters": {**YARN, "truncate": 1}}, "rope_parameters.truncate"),
        ({"rope_parameters": {**YARN, "beta_fast": 0.5}}, "rope_parameters.beta_fast"),
        ({"rope_parameters": {**YARN, "attention_factor": -1.0}}, "rope_parameters.attention_factor"),
        ({"rope_parameters": {**YARN, "mscale": "1"}}, "rope_parameters.mscale"),
        ({"rope_parameters": LLAMA3, "rope_scaling": YARN}, "rope_scaling"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_parameters.rope_theta"),
        ({"rope_theta": 1}, "rope_theta"),
        ({"rope_scaling": "yarn"}, "rope_scaling"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_name(fields, field):
    with pytest.raises(UnsupportedModelError) as refusal:
        parse(**fields)
    assert refusal.value.field == field


STRETCHES = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": LLAMA3,
    "llama3, original context of the model": {**LLAMA3, "original_max_position_embeddings": None},
    "yarn": YARN,
    "yarn, limits": {**YARN, "beta_fast": 8, "beta_slow": 2.5},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, attention factor": {**YARN, "attention_factor": 0.8},
    "yarn, magnitudes": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn, one magnitude": {**YARN, "mscale": 0.7},
    "yarn, factor of the contexts": {**YARN, "factor": None},
    "yarn, long": {**YARN, "factor": 40.0, "original_max_position_embeddings": 4096},
    "yarn, not stretched": {**YARN, "factor": 1.0},
    "yarn, original context of the model": {"rope_type": "yarn", "factor": 2.0},
}


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize("stretch", STRETCHES)
def test_frequencies_and_factor_equal_those_of_transformers(stretch, head_dim, theta):
    parameters = {name: value for name, value in STRETCHES[stretch].items() if value is not None or name == "factor"}
    rope = parse(rope_theta=theta, rope_scaling=STRETCHES[stretch], head_dim=head_dim)
    reference = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=128,
        rope_parameters={"rope_theta": theta, **parameters},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](reference)
    torch.testing.assert_close(inverse_frequencies(rope, head_dim), frequencies, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-12)


def test_a_stretch_changes_the_frequencies():
    default = inverse_frequencies(parse(), 16)
    for name, stretch in STRETCHES.items():
        if name != "yarn, not stretched":
            assert not torch.allclose(inverse_frequencies(parse(rope_scaling=stretch), 16), default), name
