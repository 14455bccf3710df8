import pytest

from gpu_worker.models.config import UnsupportedModelError, parse_model_config, read_model_config
from gpu_worker.models.families import FAMILIES
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
QKV = {"q_proj", "k_proj", "v_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}


def make_fields(model_type, **fields):
    return {**BASE, "model_type": model_type, "architectures": [FAMILIES[model_type].architecture], **fields}


def parse(model_type, **fields):
    return parse_model_config(make_fields(model_type, **fields))


def test_a_minimal_config_is_understood_with_its_defaults():
    config = parse_model_config(BASE)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (300, 64, 96)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert (config.max_position_embeddings, config.rms_norm_eps, config.is_tied) == (128, 1e-5, False)
    assert (config.projections_with_bias, config.has_qk_norm) == (set(), False)
    assert (config.windows, config.are_rotary) == ((None, None), (True, True))


def test_kv_memory_is_that_of_keys_and_values_of_all_layers():
    assert parse_model_config(BASE).kv_bytes_per_token(4) == 2 * 2 * 2 * 16 * 4


@pytest.mark.parametrize("model_type", FAMILIES)
def test_heads_may_have_a_size_of_their_own(model_type):
    assert parse(model_type, head_dim=48).head_dim == 48


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("llama", {}, set()),
        ("llama", {"attention_bias": True}, {*QKV, "o_proj"}),
        ("llama", {"mlp_bias": True}, MLP),
        ("mistral", {"attention_bias": False}, set()),
        ("qwen2", {}, QKV),
        ("qwen3", {}, set()),
        ("qwen3", {"attention_bias": True}, {*QKV, "o_proj"}),
        ("smollm3", {"attention_bias": True, "mlp_bias": True}, {*QKV, "o_proj", *MLP}),
    ],
)
def test_each_member_has_its_biases(model_type, fields, expected):
    assert parse(model_type, **fields).projections_with_bias == expected


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("mistral", {}, (4096,) * 4),
        ("mistral", {"sliding_window": None}, (None,) * 4),
        ("mistral", {"sliding_window": 9}, (9,) * 4),
        ("qwen2", {"sliding_window": 9, "max_window_layers": 1}, (None,) * 4),
        ("qwen2", {"sliding_window": 9, "max_window_layers": 1, "use_sliding_window": True}, (None, 9, 9, 9)),
        ("qwen2", {"sliding_window": 9, "max_window_layers": 0, "use_sliding_window": True}, (9,) * 4),
        ("qwen2", {"max_window_layers": 3, "use_sliding_window": True}, (None, None, None, 4096)),
        ("qwen2", {"sliding_window": None, "max_window_layers": 1, "use_sliding_window": True}, (None,) * 4),
        ("qwen3", {"sliding_window": 9, "use_sliding_window": True}, (None,) * 4),
        (
            "qwen3",
            {"sliding_window": 9, "use_sliding_window": True, "layer_types": [SLIDING, FULL, SLIDING, FULL]},
            (9, None, 9, None),
        ),
        ("qwen3", {"layer_types": [FULL] * 4}, (None,) * 4),
        ("smollm3", {"sliding_window": 9}, (None,) * 4),
        (
            "smollm3",
            {"sliding_window": 9, "use_sliding_window": True, "no_rope_layers": [1, 0, 1, 0]},
            (None, 9, None, 9),
        ),
    ],
)
def test_each_layer_has_its_window(model_type, fields, expected):
    assert parse(model_type, num_hidden_layers=4, **fields).windows == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (True, True, True, False)),
        ({"no_rope_layer_interval": 2}, (True, False, True, False)),
        ({"no_rope_layers": [0, 1, 1, 0]}, (False, True, True, False)),
    ],
)
def test_some_layers_of_smollm3_do_not_turn(fields, expected):
    assert parse("smollm3", num_hidden_layers=4, **fields).are_rotary == expected


def test_defaults_are_those_of_the_member():
    assert parse("smollm3").is_tied
    assert not parse("smollm3", tie_word_embeddings=False).is_tied
    assert not parse("qwen3").is_tied
    assert parse("qwen3").has_qk_norm
    assert parse("qwen3").head_dim == 128
    assert parse("qwen2").head_dim == 16
    assert (parse("qwen2").rope.theta, parse("smollm3").rope.theta) == (1e4, 2e6)


def test_a_llama_without_kv_heads_has_one_per_head():
    fields = {name: value for name, value in BASE.items() if name != "num_key_value_heads"}
    assert parse_model_config(fields).num_kv_heads == 4
    assert parse_model_config({**fields, "num_key_value_heads": None}).num_kv_heads == 4
    assert parse("mistral", num_key_value_heads=None).num_kv_heads == 4


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_type": "mixtral"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"architectures": ["MistralForCausalLM"]}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"no_rope_layers": [1, 1]}, "no_rope_layers"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"a_field_of_next_year": 1}, "a_field_of_next_year"),
        ({"a_field_of_next_year": False}, "a_field_of_next_year"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_key_value_heads": True}, "num_key_value_heads"),
        ({"hidden_size": 66}, "hidden_size"),
        ({"head_dim": 15}, "head_dim"),
        ({"head_dim": 0}, "head_dim"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"intermediate_size": 0}, "intermediate_size"),
        ({"num_attention_heads": 4.0}, "num_attention_heads"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"mlp_bias": "no"}, "mlp_bias"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(change, field):
    with pytest.raises(UnsupportedModelError) as refusal:
        parse_model_config({**BASE, **change})
    assert refusal.value.field == field
    assert field in str(refusal.value)


@pytest.mark.parametrize(
    ("model_type", "change", "field"),
    [
        ("mistral", {"attention_bias": True}, "attention_bias"),
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("qwen2", {"attention_bias": True}, "attention_bias"),
        ("qwen2", {"use_mrope": True}, "use_mrope"),
        ("qwen2", {"use_sliding_window": 1}, "use_sliding_window"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": "9"}, "sliding_window"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("smollm3", {"no_rope_layers": [1, 2]}, "no_rope_layers"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
    ],
)
def test_what_a_member_does_not_have_is_refused_by_name(model_type, change, field):
    with pytest.raises(UnsupportedModelError) as refusal:
        parse(model_type, **change)
    assert refusal.value.field == field


def test_a_feature_that_is_switched_off_is_no_reason_to_refuse():
    off = {"sliding_window": None, "quantization_config": None, "use_mrope": False, "rope_interleaved": False}
    assert parse_model_config({**BASE, **off}) == parse_model_config(BASE)


def test_fields_without_effect_are_no_reason_to_refuse():
    without_effect = {"torch_dtype": "bfloat16", "use_cache": True, "initializer_range": 0.02, "eos_token_id": [1, 2]}
    assert parse_model_config({**BASE, **without_effect}) == parse_model_config(BASE)


@pytest.mark.parametrize("content", [None, "not json", "[]"])
def test_a_config_file_that_cannot_be_read_is_named(content, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelFilesError, match=r"config\.json"):
        read_model_config(tmp_path)
