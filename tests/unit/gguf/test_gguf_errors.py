"""What is wrong with a GGUF file is refused with a typed error that names the field."""

import math
import struct

import pytest

from gpu_worker.artifacts.gguf_config import config_fields
from gpu_worker.artifacts.simulated_model import VOCAB_SIZE
from gpu_worker.artifacts.weights import WeightsError
from gpu_worker.models.config import read_model_config
from service_kit.gguf.errors import GgufError, UnsupportedGgufError
from service_kit.gguf.header import read_header
from service_kit.gguf.tokenizer import tokenizer_document
from service_kit.model_manifest import ModelFilesError, find_model, list_manifests, read_manifest
from tests.support.gguf_files import read_everything, write_gguf
from tests.support.tiny_models import LLAMA3_ROPE, make_tiny_model


@pytest.mark.parametrize(
    "key",
    [
        "general.architecture", "llama.context_length", "llama.embedding_length", "llama.block_count",
        "llama.feed_forward_length", "llama.attention.head_count", "llama.attention.layer_norm_rms_epsilon",
        "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens", "tokenizer.ggml.merges",
        "tokenizer.ggml.bos_token_id",
    ],
)  # fmt: skip
def test_a_missing_key_is_named(key, model, tmp_path):
    write_gguf(tmp_path / "x.gguf", model, changes={key: None})
    with pytest.raises(GgufError, match="missing") as caught:
        read_everything(tmp_path / "x.gguf")
    assert caught.value.field == key


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("general.architecture", "falcon", "only llama, qwen2, qwen3, smollm3"),
        ("general.type", "adapter", "not a model of its own"),
        ("tokenizer.ggml.model", "bert", "'bert' is not read"),
        ("tokenizer.ggml.pre", "unheard-of", "'unheard-of' is not known"),
        ("llama.expert_count", 8, "8 is not understood"),
        ("llama.some_new_thing", [1, 2], "not understood"),
        ("llama.rope.scaling.type", "longrope", "'longrope' is not computed"),
        ("llama.rope.dimension_count", 8, "8, where heads have 16"),
        ("llama.rope.scaling.attn_factor", 1.2, "only 1"),
    ],
)
def test_what_is_not_served_is_refused_by_name_with_what_to_do(key, value, words, model, tmp_path):
    changes = {key: value, "falcon.context_length": 64} if value == "falcon" else {key: value}
    write_gguf(tmp_path / "x.gguf", model, changes=changes)
    with pytest.raises(UnsupportedGgufError, match=words) as caught:
        read_everything(tmp_path / "x.gguf")
    assert caught.value.field == key


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("tokenizer.ggml.tokens", ["a", "b", "a"], "'a' twice"),
        ("tokenizer.ggml.eos_token_id", 10_000, "not an id"),
        ("tokenizer.ggml.bos_token_id", "x", "not a whole number"),
        ("llama.attention.head_count", 0, "not above 0"),
        ("llama.attention.head_count", [4, 4], "not a whole number"),
        ("llama.attention.head_count_kv", 3, "4 heads are not a multiple of 3"),
        ("llama.attention.layer_norm_rms_epsilon", math.nan, "nan is not a positive number"),
        ("llama.rope.freq_base", -1.0, "-1.0 is not a positive number"),
        ("llama.rope.scaling.factor", math.inf, "inf is not a positive number"),
        ("llama.block_count", 2**31 - 1, "no tensor of the last layer"),
        ("llama.context_length", 2**31 - 1, "not between 1 and 4194304"),
        ("llama.context_length", 0, "not between 1 and 4194304"),
        ("tokenizer.ggml.token_type", [math.nan] * (VOCAB_SIZE + 1), "not a list of whole numbers"),
        ("tokenizer.ggml.token_type", [1, 1], f"has 2 entries, not {VOCAB_SIZE + 1}"),
        ("tokenizer.ggml.merges", ["ab"], "not two parts"),
        ("general.alignment", 3, "power of two"),
    ],
)
def test_a_wrong_value_is_refused_and_the_key_named(key, value, words, model, tmp_path):
    write_gguf(tmp_path / "x.gguf", model, changes={key: value})
    with pytest.raises(GgufError, match=words) as caught:
        read_everything(tmp_path / "x.gguf")
    assert caught.value.field == key


def test_more_tokens_than_rows_are_refused(model, tmp_path):
    tokens = [str(number) for number in range(VOCAB_SIZE + 2)]
    write_gguf(tmp_path / "x.gguf", model, changes={"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": None})
    with pytest.raises(GgufError, match=r"\(259, 64\), which is not a row for each of 260 tokens") as caught:
        read_everything(tmp_path / "x.gguf")
    assert caught.value.field == "token_embd.weight"


def test_a_window_of_an_architecture_without_one_is_refused(tmp_path):
    make_tiny_model(tmp_path, "qwen2", vocab_size=VOCAB_SIZE + 1, num_hidden_layers=1)
    write_gguf(tmp_path / "x.gguf", tmp_path, changes={"qwen2.attention.sliding_window": 7})
    with pytest.raises(UnsupportedGgufError, match="7 is not computed here") as caught:
        read_everything(tmp_path / "x.gguf")
    assert caught.value.field == "qwen2.attention.sliding_window"


def test_divisors_of_a_rotation_that_cannot_be_are_refused(tmp_path):
    make_tiny_model(tmp_path, "llama", vocab_size=VOCAB_SIZE + 1, num_hidden_layers=1, rope_parameters=LLAMA3_ROPE)
    path = tmp_path / "x.gguf"
    write_gguf(path, tmp_path, changes={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0})
    with pytest.raises(UnsupportedGgufError, match="beside linear scaling") as caught:
        read_everything(path)
    assert caught.value.field == "rope_freqs.weight"
    write_gguf(path, tmp_path)
    content, offset = path.read_bytes(), read_header(path).tensors["rope_freqs.weight"].offset
    for number in (0.0, -1.0, math.inf, math.nan):
        path.write_bytes(content[:offset] + struct.pack("<f", number) + content[offset + 4 :])
        with pytest.raises(UnsupportedGgufError, match="not 8 positive numbers"):
            read_everything(path)


def test_scores_that_are_no_numbers_are_refused(model, tmp_path):
    """They would be sorted in any order, which is that of the merges."""
    scores = [0.0] * VOCAB_SIZE + [math.nan]
    changes = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores}
    write_gguf(tmp_path / "x.gguf", model, changes=changes)
    with pytest.raises(GgufError, match="not a number") as caught:
        read_everything(tmp_path / "x.gguf")
    assert caught.value.field == "tokenizer.ggml.scores"


def test_a_type_of_tensor_that_is_not_read_is_refused_with_those_that_are(whole, tmp_path):
    name = b"blk.0.ffn_down.weight"
    at = whole.index(name) + len(name) + 4 + 2 * 8
    assert whole[at : at + 4] == struct.pack("<I", 0)
    path = tmp_path / "x.gguf"
    path.write_bytes(whole[:at] + struct.pack("<I", 23) + whole[at + 4 :])
    with pytest.raises(UnsupportedGgufError, match="type IQ4_XS; quantize the model to one of F32, F16") as caught:
        read_everything(path)
    assert caught.value.field == name.decode()


@pytest.mark.parametrize(
    ("changes", "tensor", "words"),
    [
        ({"llama.feed_forward_length": 95}, "blk.0.ffn_gate.weight", r"\(96, 64\), the metadata asks for \(95, 64\)"),
        ({"llama.embedding_length": 2**31}, "token_embd.weight", r"the metadata asks for \(259, 2147483648\)"),
        ({"llama.attention.head_count_kv": 4}, "blk.0.attn_k.weight", r"\(32, 64\), the metadata asks for \(64, 64\)"),
    ],
)
def test_a_tensor_of_another_shape_is_named(changes, tensor, words, model, tmp_path):
    write_gguf(tmp_path / "x.gguf", model, changes=changes)
    with pytest.raises(GgufError, match=words) as caught:
        read_everything(tmp_path / "x.gguf")
    assert caught.value.field == tensor


def test_missing_and_unexpected_tensors_are_named(whole, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(whole.replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_uq.weight"))
    with pytest.raises(WeightsError, match=r"missing tensors: blk\.0\.ffn_up\.weight"):
        read_everything(path)
    path.write_bytes(whole.replace(b"token_embd.weight", b"tokem_embd.weight"))
    with pytest.raises(GgufError, match="missing") as caught:
        read_everything(path)
    assert caught.value.field == "token_embd.weight"


def test_parts_of_a_split_model_that_are_absent_or_of_another_one_are_refused(model, tmp_path):
    write_gguf(tmp_path / "s.gguf", model, split_max_tensors=4)
    first, second, third = sorted(tmp_path.glob("s-*.gguf"))
    read_everything(first)
    assert list_manifests(tmp_path) == {"s": first}
    assert find_model(tmp_path, "s") == first
    with pytest.raises(GgufError, match=r"split\.count|missing"):
        read_header(second)
    original = second.read_bytes()
    second.write_bytes(third.read_bytes())
    with pytest.raises(GgufError, match="not part 2 of 3") as caught:
        read_header(first)
    assert caught.value.field == "split.no"
    second.write_bytes(original)
    content = first.read_bytes()
    at = content.index(b"split.tensors.count") + len(b"split.tensors.count") + 4
    first.write_bytes(content[:at] + struct.pack("<i", 99) + content[at + 4 :])
    with pytest.raises(GgufError, match="99, but the parts have 12 tensors") as caught:
        read_header(first)
    assert caught.value.field == "split.tensors.count"
    first.write_bytes(content)
    third.unlink()
    with pytest.raises(ModelFilesError, match=third.name):
        read_everything(first)


@pytest.mark.parametrize("stem", ["x-00001-of-00000", "x-00004-of-00003", "x-00000-of-00001"])
def test_a_name_like_that_of_a_part_that_cannot_be_is_any_name(stem, whole, tmp_path):
    path = tmp_path / f"{stem}.gguf"
    path.write_bytes(whole)
    assert list_manifests(tmp_path) == {stem: path}
    assert find_model(tmp_path, stem) == path
    assert read_manifest(path).model == stem


@pytest.mark.parametrize(
    ("window", "model_type"), [(255, "mistral"), (256, "llama"), (2**32 - 1, "llama"), (0, "llama")]
)
def test_a_window_as_long_as_the_context_is_none(window, model_type, model, tmp_path):
    write_gguf(tmp_path / "x.gguf", model, changes={"llama.attention.sliding_window": window})
    assert config_fields(read_header(tmp_path / "x.gguf"))["model_type"] == model_type
    assert read_model_config(tmp_path / "x.gguf").windows == ((window,) if model_type == "mistral" else (None,))


def test_a_whole_file_is_read(whole, model):
    header = read_header(model / "whole.gguf")
    assert tokenizer_document(header)["model"]["vocab"]["ab"] == VOCAB_SIZE
    assert config_fields(header)["max_position_embeddings"] == 256
    read_everything(model / "whole.gguf")
