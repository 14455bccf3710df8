import json
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from gpu_worker.engine.text import TokenTable
from service_kit.token_bytes import UnsupportedTokenizerError, byte_level_alphabet

SPACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
FUSE = {"type": "Fuse"}


def sequence(*steps: dict) -> dict:
    return {"type": "Sequence", "decoders": list(steps)}


def write_tokenizer(directory: Path, **parts):
    document = {"model": {"vocab": {}}, "added_tokens": [], "decoder": {"type": "ByteLevel"}} | parts
    (directory / "tokenizer.json").write_text(json.dumps(document))


def all_bytes(table: TokenTable) -> list[bytes]:
    return [table.bytes_of(token_id) for token_id in range(table.vocab_size)]


def test_the_byte_level_alphabet_is_that_of_the_tokenizers_library():
    assert set(byte_level_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_level_alphabet().values()) == list(range(256))


def test_special_added_tokens_have_no_text_and_others_their_content(tmp_path):
    added = [
        {"id": 1, "content": "<|end|>", "special": True},
        {"id": 3, "content": "  é", "special": False},
    ]
    write_tokenizer(tmp_path, model={"vocab": {"Ġa": 0, "<|end|>": 1}}, added_tokens=added)
    assert all_bytes(TokenTable.from_directory(tmp_path)) == [b" a", b"", b"", "  é".encode()]


def test_added_tokens_are_decoded_like_all_tokens(tmp_path):
    added = [{"id": 1, "content": "▁▁", "special": False}, {"id": 2, "content": "Ġé", "special": False}]
    write_tokenizer(tmp_path, model={"vocab": {"a": 0}}, added_tokens=added, decoder={"type": "Metaspace"})
    assert all_bytes(TokenTable.from_directory(tmp_path)) == [b"a", b"  ", "Ġé".encode()]
    write_tokenizer(tmp_path, model={"vocab": {"a": 0}}, added_tokens=added)
    assert all_bytes(TokenTable.from_directory(tmp_path)) == [b"a", "▁▁".encode(), b" \xe9"]


def test_metaspace_tokens_have_spaces_and_byte_fallback(tmp_path):
    decoder = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    write_tokenizer(tmp_path, model={"vocab": {"▁a": 0, "<0xEA>": 1, "가": 2}}, decoder=decoder)
    assert all_bytes(TokenTable.from_directory(tmp_path)) == [b" a", b"\xea", "가".encode()]


def test_a_unigram_vocabulary_without_byte_fallback_keeps_byte_tokens_literal(tmp_path):
    write_tokenizer(tmp_path, model={"vocab": [["▁", -1.0], ["<0x41>", -2.0]]}, decoder={"type": "Metaspace"})
    assert all_bytes(TokenTable.from_directory(tmp_path)) == [b" ", b"<0x41>"]


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        ({"type": "WordPiece"}, "WordPiece"),
        (None, "none"),
        ({"type": "Sequence", "decoders": [{"type": "ByteLevel"}, {"type": "Metaspace"}]}, "ByteLevel"),
        ({"type": "Replace", "pattern": {"String": "x"}, "content": " "}, "Replace"),
        (sequence(SPACE, {"type": "Strip", "content": " ", "start": 1, "stop": 0}), r"Replace \+ Strip"),
        (sequence(SPACE, FUSE, {"type": "Strip", "content": " ", "start": 0, "stop": 1}), "Strip"),
        (sequence(SPACE, FUSE, {"type": "Strip", "content": "x", "start": 1, "stop": 0}), "Strip"),
        (sequence(FUSE, SPACE), r"Fuse \+ Replace"),
        (sequence(SPACE, FUSE, {"type": "ByteFallback"}), "ByteFallback"),
        (sequence({"type": "ByteFallback"}, FUSE), "ByteFallback"),
        (sequence(SPACE, {"type": "CTC"}), "CTC"),
    ],
)
def test_other_decoders_are_refused_by_name(tmp_path, decoder, named):
    write_tokenizer(tmp_path, decoder=decoder)
    with pytest.raises(UnsupportedTokenizerError, match=named):
        TokenTable.from_directory(tmp_path)


def test_a_missing_or_broken_file_is_refused(tmp_path):
    with pytest.raises(UnsupportedTokenizerError, match=r"tokenizer\.json"):
        TokenTable.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(UnsupportedTokenizerError, match=r"tokenizer\.json"):
        TokenTable.from_directory(tmp_path)


def test_ids_beyond_the_table_have_no_text():
    table = TokenTable([b"a"])
    assert table.bytes_of(1) == b""
    with pytest.raises(ValueError, match="negative"):
        table.bytes_of(-1)
