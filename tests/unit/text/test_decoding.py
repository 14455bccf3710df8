"""The text of an output against `Tokenizer.decode` of Hugging Face's library, on random ids."""

import codecs
import random
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gpu_worker.engine.text import OutputStage, StopRules, TokenTable
from service_kit.delta import join

NUM_LISTS = 1000
NEVER = "\U0010ffff"
ADDED = (
    AddedToken("<tool>", normalized=True),
    AddedToken("  pad", normalized=False, lstrip=True),
    AddedToken("end ", normalized=True, rstrip=True),
    AddedToken("▁▁▁", normalized=False),
    AddedToken("café", normalized=True, single_word=True),
    AddedToken("Ġ한", normalized=False, lstrip=True, rstrip=True),
)
SPECIAL = (AddedToken("<|end|>", special=True), AddedToken("<|pad|>", special=True, lstrip=True, normalized=True))
TEXT = "a 한국어 naïve 👩‍👩‍👧 \ufffd ▁ \n<0x41> é"


def decode(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=True)


def with_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_tokens(list(ADDED))
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def byte_level() -> Tokenizer:
    """All single bytes, and pieces of a text that begin and end anywhere inside characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(TEXT)[0][0]
    pieces = {printable[start : start + length] for start in range(len(printable)) for length in range(2, 5)}
    vocabulary = {token: index for index, token in enumerate([*alphabet, *sorted(pieces), "not→in the alphabet"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentence_piece(decoder: decoders.Decoder, space: str = "▁") -> Tokenizer:
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [
        "b",
        space,
        space * 2,
        f"{space}a",
        f"a{space}b",
        "한",
        f"{space}국어",
        "👩",
        "\u200d",
        "é",
        "\ufffd",
        "▁",
        "Ġ",
    ]
    odd = ["<0x4>", "<0xZZ>", "<0X41>", f"<0x41>{space}", "<0xea>", "<0x0a>"]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys([*pieces, *odd, *byte_tokens]))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoder
    return tokenizer


def llama() -> decoders.Decoder:
    return decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


SENTENCE_PIECE: dict[str, Callable[[], Tokenizer]] = {
    "llama": lambda: sentence_piece(llama()),
    "gemma": lambda: sentence_piece(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    ),
    "metaspace": lambda: sentence_piece(decoders.Metaspace()),
    "metaspace that prepends nothing": lambda: sentence_piece(decoders.Metaspace(prepend_scheme="never")),
    "metaspace of another character": lambda: sentence_piece(decoders.Metaspace(replacement="_"), space="_"),
    "metaspace with bytes": lambda: sentence_piece(decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback()])),
    "llama with added tokens": lambda: with_added_tokens(sentence_piece(llama())),
    "metaspace with added tokens": lambda: with_added_tokens(sentence_piece(decoders.Metaspace())),
}


def table_of(tokenizer: Tokenizer, directory: Path) -> TokenTable:
    tokenizer.save(str(directory / "tokenizer.json"))
    return TokenTable.from_directory(directory)


def random_lists(tokenizer: Tokenizer) -> list[list[int]]:
    """Many tokens are of the last few, the added ones; some ids are nobody's; some rows of byte tokens spell characters."""
    numbers = random.Random(7)
    size = tokenizer.get_vocab_size()
    rows = [[tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in character.encode()] for character in "Aé한👩"]
    spelled = [row for row in rows if None not in row]

    def some_ids() -> list[int]:
        any_of_all, any_of_last = [numbers.randrange(size)], [numbers.randrange(size - 8, size + 1)]
        return numbers.choice([any_of_all, any_of_last, *spelled])

    return [[token_id for _ in range(numbers.randrange(16)) for token_id in some_ids()] for _ in range(NUM_LISTS)]


def streamed_text(table: TokenTable, token_ids: list[int]) -> str:
    """The whole text; what is emitted on the way is a beginning of it, though much looks like a stop string's beginning."""
    stage = OutputStage(table, StopRules(stop=("a" + NEVER, " " + NEVER, "\ufffd" + NEVER, "한국" + NEVER)))
    emissions = [stage.push(token_id).delta for token_id in token_ids]
    delta = join(part for part in [*emissions, stage.flush().delta] if part is not None)
    assert (delta.token_ids if delta else ()) == tuple(token_ids)
    return delta.text if delta else ""


def assert_equals_the_library(tokenizer: Tokenizer, table: TokenTable, token_ids: list[int]) -> None:
    """Equal, but for a U+FFFD that the library adds for an incomplete character at the very end."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(b"".join(table.bytes_of(token_id) for token_id in token_ids))
    incomplete, _ = decoder.getstate()
    end = "\ufffd" if incomplete else ""
    assert streamed_text(table, token_ids) + end == decode(tokenizer, token_ids)


@pytest.mark.parametrize("has_added_tokens", [False, True])
def test_byte_level_outputs_have_the_text_of_the_library(tmp_path, has_added_tokens):
    tokenizer = with_added_tokens(byte_level()) if has_added_tokens else byte_level()
    table = table_of(tokenizer, tmp_path)
    for token_ids in random_lists(tokenizer):
        assert_equals_the_library(tokenizer, table, token_ids)


@pytest.mark.model
def test_the_real_models_outputs_have_the_text_of_the_library(smollm2):
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    table = TokenTable.from_directory(smollm2)
    lists = random_lists(tokenizer)
    texts = [tokenizer.encode(TEXT * count, add_special_tokens=False).ids for count in range(3)]
    for token_ids in [*lists, *texts]:
        assert_equals_the_library(tokenizer, table, token_ids)
    assert [streamed_text(table, token_ids) for token_ids in texts] == [TEXT * count for count in range(3)]


def byte_of(tokenizer: Tokenizer, token_id: int) -> int | None:
    """The byte that a byte token stands for where the library decodes such tokens."""
    token = tokenizer.id_to_token(token_id)
    is_byte = len(token) == 6 and token.startswith("<0x") and len(decode(tokenizer, [0, token_id])) == 2
    return int(token[3:5], 16) if is_byte else None


def has_byte_fallback(tokenizer: Tokenizer) -> bool:
    return byte_of(tokenizer, tokenizer.token_to_id("<0x41>")) is not None


def continued_text(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """What the library adds to the text of a prompt (`b`, token 0) when these ids continue it."""
    prompt, whole = decode(tokenizer, [0]), decode(tokenizer, [0, *token_ids])
    assert whole.startswith(prompt)
    return whole[len(prompt) :]


def rows_of_bytes_and_others(tokenizer: Tokenizer, token_ids: list[int]) -> list[tuple[bytes, list[int]]]:
    """What can be seen of an output, cut where byte tokens and others meet; of others the bytes are empty."""
    special = {tokenizer.token_to_id(token.content) for token in SPECIAL}
    visible = [token_id for token_id in token_ids if token_id not in special and token_id < tokenizer.get_vocab_size()]
    rows = [list(row) for _, row in groupby(visible, key=lambda token_id: byte_of(tokenizer, token_id) is None)]
    return [
        (bytes(byte for token_id in row if (byte := byte_of(tokenizer, token_id)) is not None), row) for row in rows
    ]


@pytest.mark.parametrize("family", SENTENCE_PIECE)
def test_sentence_piece_outputs_have_the_text_that_the_library_adds_to_a_prompt(tmp_path, family):
    """But for byte tokens in a row that do not spell characters: the library makes each of them U+FFFD, even those that
    belong to whole characters, which a stream cannot know before the row ends; ours are decoded on the way, and an
    incomplete character at the very end adds nothing.
    """
    tokenizer = SENTENCE_PIECE[family]()
    table = table_of(tokenizer, tmp_path)
    num_broken = num_spelled = 0
    for token_ids in random_lists(tokenizer):
        rows = rows_of_bytes_and_others(tokenizer, token_ids)
        texts = [continued_text(tokenizer, row) for _, row in rows]
        assert "".join(texts) == continued_text(tokenizer, token_ids)
        for index, (data, row) in enumerate(rows):
            if not data or data.decode(errors="ignore").encode() == data:
                num_spelled += bool(data)
                continue
            num_broken += 1
            assert texts[index] == "\ufffd" * len(row)
            is_last = index == len(rows) - 1
            texts[index] = codecs.getincrementaldecoder("utf-8")("replace").decode(data, not is_last)
        assert streamed_text(table, token_ids) == "".join(texts)
    assert (num_broken > 100 and num_spelled > 100) == has_byte_fallback(tokenizer)


def test_an_output_keeps_the_space_that_the_library_strips_from_a_text(tmp_path):
    tokenizer = sentence_piece(llama())
    table = table_of(tokenizer, tmp_path)
    token_ids = [tokenizer.token_to_id("▁a"), tokenizer.token_to_id("b")]
    assert decode(tokenizer, token_ids) == "ab"
    assert streamed_text(table, token_ids) == " ab" == continued_text(tokenizer, token_ids)
