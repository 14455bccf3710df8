import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from service_kit.model_manifest import content_revision, read_manifest
from sluice.errors import UserError
from sluice.models.convert import convert_gguf
from tests.support.tiny_gguf import CHAT_TEMPLATE, END_OF_TEXT, make_tiny_llama, tiny_vocabulary, write_tiny_gguf


@pytest.fixture(scope="module")
def original() -> LlamaForCausalLM:
    return make_tiny_llama(seed=3)


@pytest.fixture(scope="module")
def converted(original: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("converted")
    write_tiny_gguf(directory / "tiny.gguf", original)
    model = directory / "model"
    model.mkdir()
    convert_gguf(directory / "tiny.gguf", model, name="tiny", end_of_text=(END_OF_TEXT,))
    return model


def test_the_converted_model_computes_the_logits_of_the_original(original: LlamaForCausalLM, converted: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    ids = torch.arange(3, 60).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, original(ids).logits, rtol=1e-6, atol=1e-6)


def test_the_manifest_holds_all_end_tokens_and_the_hash_of_the_files(converted: Path) -> None:
    manifest = read_manifest(converted)
    assert manifest.eos_token_ids == (0, 2)
    assert manifest.revision == content_revision(converted)
    assert (manifest.model, manifest.precision) == ("tiny", "fp32")
    assert (manifest.context_length, manifest.vocab_size, manifest.bos_token_id) == (128, len(tiny_vocabulary()), 1)


def test_the_tokenizer_splits_digits_merges_pairs_and_keeps_special_tokens_whole(converted: Path) -> None:
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    assert tokenizer.encode("ab a12<|im_end|>").tokens == ["ab", "Ġa", "1", "2", "<|im_end|>"]
    text = "naïve 日本 ab\n"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert json.loads((converted / "tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE


def test_another_architecture_or_an_unknown_word_splitting_is_refused_by_name(
    original: LlamaForCausalLM, tmp_path: Path
) -> None:
    write_tiny_gguf(tmp_path / "other.gguf", original, architecture="falcon")
    with pytest.raises(UserError, match="falcon"):
        convert_gguf(tmp_path / "other.gguf", tmp_path, name="other")
    write_tiny_gguf(tmp_path / "pre.gguf", original, pre="unheard-of")
    with pytest.raises(UserError, match="unheard-of"):
        convert_gguf(tmp_path / "pre.gguf", tmp_path, name="pre")


def test_an_end_token_that_the_file_does_not_have_is_refused(original: LlamaForCausalLM, tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", original)
    with pytest.raises(UserError, match="<no>"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path, name="tiny", end_of_text=("<no>",))
