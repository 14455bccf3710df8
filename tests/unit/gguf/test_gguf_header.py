"""A file that is damaged is refused with a typed error that names the field, and takes no memory for what it claims."""

import struct
import tracemalloc

import pytest

from service_kit.gguf.errors import GgufError
from service_kit.gguf.header import read_header
from service_kit.model_manifest import read_manifest


@pytest.mark.parametrize(
    ("offset", "content", "field"),
    [
        pytest.param(0, b"GGML", "magic", id="another magic"),
        pytest.param(4, struct.pack("<I", 1), "version", id="version 1"),
        pytest.param(4, struct.pack(">I", 3), "version", id="big-endian"),
        pytest.param(8, struct.pack("<Q", 2**60), "tensor_count", id="more tensors than any model has"),
        pytest.param(16, struct.pack("<Q", 2**60), "kv_count", id="more keys than any model has"),
        pytest.param(24, struct.pack("<Q", 2**60), "kv_count", id="a key without end"),
    ],
)
def test_a_damaged_beginning_is_refused_and_the_field_named(offset, content, field, whole, tmp_path):
    path = tmp_path / "damaged.gguf"
    path.write_bytes(whole[:offset] + content + whole[offset + len(content) :])
    with pytest.raises(GgufError) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert caught.value.field == field


def value(kind: int, *parts: bytes) -> bytes:
    """A file whose only field is general.x: a value of this type."""
    key = b"general.x"
    return b"".join([b"GGUF", struct.pack("<IQQQ", 3, 0, 1, len(key)), key, struct.pack("<I", kind), *parts])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(value(9, struct.pack("<IQ", 7, 2**36)), "68719476736 entries", id="a list of truth values"),
        pytest.param(value(9, struct.pack("<IQ", 8, 2**32)), "4294967296 entries", id="a list of texts"),
        pytest.param(value(8, struct.pack("<Q", 2**36)), "128 MiB", id="a text"),
        pytest.param(value(9, struct.pack("<IQQ", 8, 2**20, 2**36)), "128 MiB", id="a text in a list"),
        pytest.param(value(9, struct.pack("<IQ", 9, 1)), "type 9", id="a list of lists"),
        pytest.param(value(13), "type 13", id="an unknown type"),
        pytest.param(value(8, struct.pack("<Q", 2), b"\xff\xfe"), "not UTF-8", id="a text of other bytes"),
    ],
)
def test_a_value_that_cannot_be_is_refused_without_memory_for_it(content, words, tmp_path):
    """In files that are long enough, as far as their size is concerned: they take no space."""
    path = tmp_path / "x.gguf"
    with path.open("wb") as file:
        file.write(content)
        file.truncate(1 << 37)
    tracemalloc.start()
    try:
        with pytest.raises(GgufError, match=words) as caught:
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 26
    finally:
        tracemalloc.stop()
    assert caught.value.field == "general.x"


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
    ("at", "packed", "words"),
    [
        pytest.param(0, struct.pack("<I", 5), "5 dimensions", id="too many dimensions"),
        pytest.param(4, struct.pack("<QQ", 2**62, 2**62), "behind the end of the file", id="absurd sizes"),
        pytest.param(20, struct.pack("<I", 12), "rows of 96 numbers, Q4_K stores 256", id="rows of no whole blocks"),
        pytest.param(24, struct.pack("<Q", 2**63), "behind the end of the file", id="an offset beyond the file"),
    ],
)
def test_a_tensor_that_cannot_be_is_named(at, packed, words, whole, tmp_path):
    """`at`: behind its name stand the number of dimensions, two of them, the type and the offset."""
    path, name = tmp_path / "x.gguf", b"blk.0.ffn_down.weight"
    start = whole.index(name) + len(name) + at
    path.write_bytes(whole[:start] + packed + whole[start + len(packed) :])
    with pytest.raises(GgufError, match=words) as caught:
        read_header(path)
    assert caught.value.field == "blk.0.ffn_down.weight"


def test_a_tensor_or_key_that_stands_twice_is_named(whole, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(whole.replace(b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"))
    with pytest.raises(GgufError, match="stands twice") as caught:
        read_header(path)
    assert caught.value.field == "blk.0.attn_k.weight"
    path.write_bytes(whole.replace(b"tokenizer.ggml.eos_token_id", b"tokenizer.ggml.bos_token_id"))
    with pytest.raises(GgufError, match="stands twice") as caught:
        read_header(path)
    assert caught.value.field == "tokenizer.ggml.bos_token_id"
