"""What is wrong with a GGUF file is refused with a typed error that names the field."""

import struct
from pathlib import Path

import pytest

from gpu_worker.artifacts.checkpoints import open_checkpoint
from gpu_worker.artifacts.gguf_config import config_fields
from gpu_worker.artifacts.simulated_model import VOCAB_SIZE
from gpu_worker.artifacts.weights import WeightsError
from gpu_worker.models.config import read_model_config
from gpu_worker.models.llama_tensors import ignored_suffixes, tensor_shapes
from service_kit.gguf.errors import GgufError, UnsupportedGgufError
from service_kit.gguf.header import read_header
from service_kit.gguf.tokenizer import tokenizer_document
from service_kit.model_manifest import ModelFilesError, find_model, list_manifests, read_manifest
from service_kit.token_bytes import read_token_bytes
from tests.support.gguf_files import write_gguf
from tests.support.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_tiny_model(directory, "llama", vocab_size=VOCAB_SIZE + 1, num_hidden_layers=1)
    return directory


@pytest.fixture(scope="module")
def whole(model) -> bytes:
    write_gguf(model / "whole.gguf", model)
    return (model / "whole.gguf").read_bytes()


def read_everything(path: Path) -> None:
    """All that gateway and worker read of a model but the numbers of its tensors."""
    read_manifest(path)
    read_token_bytes(path)
    config = read_model_config(path)
    open_checkpoint(path, shapes=tensor_shapes(config), ignored_suffixes=ignored_suffixes(config))


@pytest.mark.parametrize(
    ("offset", "content", "field"),
    [
        pytest.param(0, b"GGML", "magic", id="another magic"),
        pytest.param(4, struct.pack("<I", 1), "version", id="version 1"),
        pytest.param(4, struct.pack(">I", 3), "version", id="big-endian"),
        pytest.param(8, struct.pack("<Q", 2**60), "", id="more tensors than there are"),
        pytest.param(16, struct.pack("<Q", 2**60), "", id="more keys than there are"),
        pytest.param(24, struct.pack("<Q", 2**60), "kv_count", id="a key without end"),
    ],
)
def test_a_damaged_beginning_is_refused_and_the_field_named(offset, content, field, whole, tmp_path):
    path = tmp_path / "damaged.gguf"
    path.write_bytes(whole[:offset] + content + whole[offset + len(content) :])
    with pytest.raises(GgufError) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert caught.value.field == field or not field


def test_a_file_that_is_cut_anywhere_is_refused(whole, tmp_path):
    path = tmp_path / "cut.gguf"
    for length in [*range(0, 400, 11), *range(400, len(whole), 20011), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(GgufError, match=r"cut\.gguf"):
            read_header(path)


def test_a_cut_behind_the_header_names_the_tensor(whole, tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: -len(whole) // 4])
    with pytest.raises(GgufError, match="truncated") as caught:
        read_manifest(path)
    assert caught.value.field.endswith((".weight", ".bias"))


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
        ("tokenizer.ggml.merges", ["ab"], "not two parts"),
        ("general.alignment", 3, "power of two"),
    ],
)
def test_a_wrong_value_is_refused_and_the_key_named(key, value, words, model, tmp_path):
    write_gguf(tmp_path / "x.gguf", model, changes={key: value})
    with pytest.raises(GgufError, match=words) as caught:
        read_everything(tmp_path / "x.gguf")
    assert caught.value.field == key


def test_a_type_of_tensor_that_is_not_read_is_refused_with_those_that_are(whole, tmp_path):
    name = b"blk.0.ffn_down.weight"
    at = whole.index(name) + len(name) + 4 + 2 * 8
    assert whole[at : at + 4] == struct.pack("<I", 0)
    path = tmp_path / "x.gguf"
    path.write_bytes(whole[:at] + struct.pack("<I", 23) + whole[at + 4 :])
    with pytest.raises(UnsupportedGgufError, match="type IQ4_XS; quantize the model to one of F32, F16") as caught:
        read_everything(path)
    assert caught.value.field == name.decode()


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
    second.write_bytes(third.read_bytes())
    with pytest.raises(GgufError, match="not part 2 of 3") as caught:
        read_header(first)
    assert caught.value.field == "split.no"
    third.unlink()
    with pytest.raises(ModelFilesError, match=third.name):
        read_everything(first)


def test_a_whole_file_is_read(whole, model):
    header = read_header(model / "whole.gguf")
    assert tokenizer_document(header)["model"]["vocab"]["ab"] == VOCAB_SIZE
    assert config_fields(header)["max_position_embeddings"] == 256
    read_everything(model / "whole.gguf")
