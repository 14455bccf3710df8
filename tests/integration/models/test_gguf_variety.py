"""GGUF files that differ from the usual one: without a template, with added tokens, with more rows than tokens."""

import json
from pathlib import Path

import pytest

from gateway.chat_template import ChatTemplateError, Message
from gateway.tokenization import TextEncoder
from gpu_worker.artifacts.simulated_model import BOS_TOKEN_ID, EOS_TOKEN_ID, VOCAB_SIZE
from gpu_worker.engine.loading import load_native_engine
from gpu_worker.engine.settings import EngineSettings
from gpu_worker.engine.text import TokenTable
from service_kit.model_manifest import read_manifest
from tests.support.engine_runs import make_spec, run_to_end
from tests.support.gguf_files import write_gguf
from tests.support.tiny_models import encode, make_tiny_model

SETTINGS = EngineSettings(threads=1, num_blocks=20, max_running=2)
NUM_PADDING = 31


@pytest.fixture
def model(tmp_path) -> Path:
    """More rows than tokens, as models have whose vocabulary was padded."""
    make_tiny_model(tmp_path, "llama", vocab_size=VOCAB_SIZE + NUM_PADDING, num_hidden_layers=1, context_length=64)
    return tmp_path


def test_a_file_without_a_chat_template_completes_texts_only(model):
    write_gguf(model / "x.gguf", model, changes={"tokenizer.chat_template": None})
    encoder = TextEncoder(model / "x.gguf")
    assert not encoder.has_chat_template
    with pytest.raises(ChatTemplateError, match="no chat template"):
        encoder.encode_chat([Message(role="user", content="a")])
    assert encoder.encode_text("xy") == (BOS_TOKEN_ID, *encode("xy"))


@pytest.mark.parametrize(
    ("changes", "surrounded"),
    [
        ({"tokenizer.ggml.add_bos_token": False}, encode("xy")),
        ({"tokenizer.ggml.add_eos_token": True}, (BOS_TOKEN_ID, *encode("xy"), EOS_TOKEN_ID)),
        ({"tokenizer.ggml.add_bos_token": None}, encode("xy")),
        ({"tokenizer.ggml.add_bos_token": None, "tokenizer.ggml.pre": "llama-bpe"}, (BOS_TOKEN_ID, *encode("xy"))),
    ],
)
def test_what_stands_around_a_text_is_what_the_file_says_or_its_word_splitting_means(changes, surrounded, model):
    write_gguf(model / "x.gguf", model, changes=changes)
    assert TextEncoder(model / "x.gguf").encode_text("xy") == tuple(surrounded)


def test_rows_beyond_the_tokens_are_drawn_as_tokens_without_text(model):
    write_gguf(model / "x.gguf", model)
    assert read_manifest(model / "x.gguf").vocab_size == VOCAB_SIZE + NUM_PADDING
    engine = load_native_engine(model / "x.gguf", settings=SETTINGS)
    last = VOCAB_SIZE + NUM_PADDING - 1
    spec = make_spec("s", encode("some words"), max_output_tokens=3, logit_bias=((last, 100.0),), logprobs=1)
    result = run_to_end(engine, [spec])["s"]
    assert (result.token_ids, result.text) == ((last,) * 3, "")


def test_added_tokens_are_whole_in_a_text_and_end_an_output_if_they_are_known_to(model):
    path = model / "tokenizer.json"
    document = json.loads(path.read_text())
    places = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    texts = {"<|im_end|>": True, "<|tool|>": True, "<think>": False}
    ids = {text: VOCAB_SIZE + number for number, text in enumerate(texts)}
    document["added_tokens"] += [
        {"id": ids[text], "content": text, "special": is_special, **places} for text, is_special in texts.items()
    ]
    path.write_text(json.dumps(document))
    write_gguf(model / "x.gguf", model, changes={"tokenizer.ggml.eot_token_id": 65, "tokenizer.ggml.eom_token_id": 66})
    token_ids = TextEncoder(model / "x.gguf").encode_text("a<think>b<|tool|>c<|im_end|>")
    a, b, c = encode("abc")
    assert token_ids == (BOS_TOKEN_ID, a, ids["<think>"], b, ids["<|tool|>"], c, ids["<|im_end|>"])
    assert read_manifest(model / "x.gguf").eos_token_ids == (65, 66, EOS_TOKEN_ID, ids["<|im_end|>"])
    table = TokenTable.from_directory(model / "x.gguf")
    assert [table.bytes_of(ids[text]) for text in texts] == [b"", b"", b"<think>"]
