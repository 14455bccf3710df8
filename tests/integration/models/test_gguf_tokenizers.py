"""Tokenizers from GGUF files against those that Hugging Face's libraries have of the same vocabularies."""

import json
import random
from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

from gateway.chat_template import Message
from gateway.tokenization import TextEncoder
from gpu_worker.engine.text import TokenTable
from service_kit.gguf.header import read_header
from service_kit.gguf.vocabulary import read_vocabulary
from tests.support.gguf_files import vocabulary_gguf

PIECES = (
    "The quick brown fox jumps over the lazy dog. ", "안녕하세요, 세계! 오늘은 날씨가 좋습니다. ", "한국어 토큰화는 어렵다\n",
    "👩‍👩‍👧 🇫🇷 😀👍🏽 ", "def f(x: int) -> dict[str, int]:\n    return {'a': x ** 2}\n", "\tfor (int i = 0; i < n; ++i) {\n",
    "    ", "\n\n\n", " \r\n", "\t\t", "  x", "3.14159 ", "1234567890", "٣٤٥ ", "don't we'll I'VE they'd ", "naïve Zürich é ",
    "東京で寿司を食べる。", "Привет, мир! ", "https://example.org/a?b=c#d ", "<|im_start|>", "<|im_end|>", "\u200b\ufeff", "--==>> ",
    "$%^&*()_+ ", "e\u0301", "\x00", "ﬁ ", "Ω≈ç√∫µ≤ ", "a" * 40, "HTTPRequest ",
)  # fmt: skip
LLAMA3 = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
QWEN2 = LLAMA3.replace("{1,3}", "")


def lines(count: int) -> list[str]:
    """Varied text; the same each time."""
    rng = random.Random(11)
    return ["".join(rng.choices(PIECES, k=rng.randint(1, 12))) for _ in range(count)]


def decoded(table: TokenTable, token_ids: list[int]) -> str:
    return b"".join(table.bytes_of(token_id) for token_id in token_ids).decode(errors="replace")


def assert_equal(file: Path, theirs: Tokenizer, texts: list[str], *, drops_first_space: bool = False) -> TextEncoder:
    ours, table = TextEncoder(file), TokenTable.from_directory(file)
    for text in texts:
        token_ids = theirs.encode(text).ids
        assert list(ours.encode_text(text)) == token_ids, repr(text)
        expected, got = theirs.decode(token_ids), decoded(table, token_ids)
        assert (got.removeprefix(" ") if drops_first_space else got) == expected, repr(text)
    return ours


@pytest.mark.model
def test_a_thousand_lines_of_smollm2_have_the_ids_and_texts_of_the_library(smollm2, tmp_path):
    vocabulary_gguf(tmp_path / "v.gguf", smollm2, pre="smollm")
    ours = assert_equal(tmp_path / "v.gguf", Tokenizer.from_file(str(smollm2 / "tokenizer.json")), lines(1000))
    chat = [Message(role="system", content="Be brief."), Message(role="user", content="안녕 👋")]
    assert ours.encode_chat(chat) == TextEncoder(smollm2).encode_chat(chat)
    header = read_header(tmp_path / "v.gguf")
    assert read_vocabulary(header).end_ids(header) == (0, 2)


def byte_level(pattern: str | None) -> Tokenizer:
    """A trained vocabulary that splits words by `pattern`, or by GPT-2's."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = (
        ByteLevel(add_prefix_space=False)
        if pattern is None
        else Sequence([Split(Regex(pattern), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(vocab_size=700, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(lines(300), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    return tokenizer


def write_directory(directory: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": "{{ bos_token }}"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("pre", "pattern", "ignores_merges", "composes"),
    [
        ("gpt-2", None, False, False),
        ("smollm", r"\p{N}", False, False),
        ("llama-bpe", LLAMA3, True, False),
        ("qwen2", QWEN2, False, True),
    ],
)
def test_each_way_to_split_words_gives_the_ids_of_the_library(pre, pattern, ignores_merges, composes, tmp_path):
    theirs = byte_level(pattern if pre != "smollm" else None)
    theirs.model.ignore_merges = ignores_merges
    if pre == "smollm":
        theirs.pre_tokenizer = Sequence([Split(Regex(pattern), "isolated"), ByteLevel(add_prefix_space=False)])
    if composes:
        theirs.normalizer = normalizers.NFC()
    if pre == "llama-bpe":
        bos = theirs.token_to_id("<|im_start|>")
        theirs.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)])
    write_directory(tmp_path, theirs)
    vocabulary_gguf(tmp_path / "v.gguf", tmp_path, pre=pre)
    assert_equal(tmp_path / "v.gguf", theirs, lines(200))


def sentence_piece(*, adds_space: bool) -> tuple[Tokenizer, list[str]]:
    """What transformers makes of a SentencePiece model: its tokens with the best first, and merges in their order."""
    from transformers.tokenization_utils_sentencepiece import generate_merges  # noqa: PLC0415 - takes seconds

    trained = Tokenizer(BPE())
    trainer = BpeTrainer(vocab_size=900, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    trained.train_from_iterator([line.replace(" ", "▁") for line in lines(300)], trainer)
    special, learnt = ["<unk>", "<s>", "</s>"], sorted(trained.get_vocab(), key=trained.token_to_id)[3:]
    # A few characters are left out, so that they fall back to bytes.
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *(token for token in learnt if "東" not in token)]
    ids = {token: index for index, token in enumerate(tokens)}
    scores = {token: -float(index) for index, token in enumerate(tokens) if index >= 259}
    merges = generate_merges(ids, scores)
    theirs = Tokenizer(BPE(vocab=ids, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [normalizers.Prepend("▁")] if adds_space else []
    theirs.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
    theirs.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    theirs.add_special_tokens(special)
    theirs.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return theirs, tokens


@pytest.mark.parametrize("adds_space", [True, False])
def test_a_sentence_piece_vocabulary_gives_the_ids_and_texts_of_the_library(adds_space, tmp_path):
    theirs, tokens = sentence_piece(adds_space=adds_space)
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "llama")
    writer.add_context_length(64)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(index) if index >= 259 else 0.0 for index in range(len(tokens))])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)])
    for key, token_id in (("unknown", 0), ("bos", 1), ("eos", 2)):
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", token_id)
    writer.add_add_space_prefix(adds_space)
    writer.add_tensor("token_embd.weight", np.zeros((1, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    texts = [text for text in lines(200) if "<|" not in text]
    assert any("東" in text for text in texts)
    assert_equal(tmp_path / "v.gguf", theirs, texts, drops_first_space=adds_space)
