import pytest

from gpu_worker.layers.rope_config import RopeConfig
from gpu_worker.models.config import UnsupportedModelError, parse_model_config, read_model_config
from service_kit.model_manifest import ModelFilesError

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


def test_a_minimal_config_is_understood_with_its_defaults():
    config = parse_model_config(BASE)
    assert (config.head_dim, config.num_kv_heads, config.is_tied, config.has_attention_bias) == (16, 2, False, False)
    assert config.rope == RopeConfig(rope_type="default", theta=10000.0)


def test_a_config_without_kv_heads_has_one_per_head():
    assert parse_model_config({**BASE, "num_key_value_heads": None}).num_kv_heads == 4


def test_both_spellings_of_the_rope_parameters_mean_the_same():
    stretch = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = parse_model_config({**BASE, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **stretch}})
    new = parse_model_config({**BASE, "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **stretch}})
    oldest = parse_model_config({**BASE, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **stretch}})
    assert old == new == oldest
    assert old.rope == RopeConfig(
        rope_type="llama3",
        theta=5e5,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_context_length=64,
    )


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_type": "mistral"}, "model_type"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"a_field_of_next_year": 1}, "a_field_of_next_year"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling.rope_type"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters.rope_type"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor"),
        ({"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "rope_parameters.factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": 66}, "hidden_size"),
        ({"head_dim": 15}, "head_dim"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(change, field):
    with pytest.raises(UnsupportedModelError) as refusal:
        parse_model_config({**BASE, **change})
    assert refusal.value.field == field
    assert field in str(refusal.value)


def test_a_feature_that_is_switched_off_is_no_reason_to_refuse():
    assert parse_model_config({**BASE, "sliding_window": None, "quantization_config": None, "use_mrope": False})


@pytest.mark.parametrize("content", [None, "not json", "[]"])
def test_a_config_file_that_cannot_be_read_is_named(content, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelFilesError, match=r"config\.json"):
        read_model_config(tmp_path)
