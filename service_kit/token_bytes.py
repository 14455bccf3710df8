"""The bytes that each token id stands for, read from a `tokenizer.json` or a GGUF file. Pure but for reading the file.

The format is that of Hugging Face `tokenizers`. Two families of decoders are understood: ByteLevel (GPT-2's printable
stand-ins for bytes) and Metaspace (SentencePiece's `▁` for a space, with `<0xNN>` tokens for single bytes). The text of
a token is what that library makes of it inside an output, without its special tokens. Two things differ, because an
output is streamed and continues a prompt: leading spaces stay, and of `<0xNN>` tokens that do not spell characters only
the broken ones become U+FFFD, not all up to the next other token.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from service_kit.tokenizer_files import read_tokenizer_document, tokenizer_path

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE = "▁"
_PER_TOKEN, _JOINING, _ON_WHOLE = range(3)
_METASPACE_STEPS = {
    "Replace": _PER_TOKEN,
    "Metaspace": _PER_TOKEN,
    "ByteFallback": _PER_TOKEN,
    "Fuse": _JOINING,
    "Strip": _ON_WHOLE,
}


class UnsupportedTokenizerError(Exception):
    """A tokenizer whose tokens cannot be turned into bytes one by one; the text names the file and the part."""


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's map from printable characters to bytes (`bytes_to_unicode` in openai/gpt-2, inverted)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


_ALPHABET = byte_level_alphabet()


def read_token_bytes(model: Path) -> tuple[bytes, ...]:
    """Bytes by token id. Special added tokens have none, other added tokens are decoded like all tokens.

    An id that the file does not name has none either. Raises UnsupportedTokenizerError, and GgufError for a GGUF file.
    """
    path = tokenizer_path(model)
    try:
        document = read_tokenizer_document(model)
        vocabulary = _vocabulary(document["model"])
        added = [
            (int(token["id"]), str(token["content"]), bool(token["special"])) for token in document["added_tokens"]
        ]
        steps = _decoder_steps(document["decoder"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UnsupportedTokenizerError(f"{path}: not a tokenizer file: {error!r}") from error
    to_bytes = _byte_level if _is_byte_level(path, steps) else _metaspace_decoder(steps)
    table = [b""] * (1 + max([*vocabulary.values(), *(token_id for token_id, _, _ in added)], default=-1))
    for token, token_id in vocabulary.items():
        table[token_id] = to_bytes(token)
    for token_id, content, is_special in added:
        table[token_id] = b"" if is_special else to_bytes(content)
    return tuple(table)


def _vocabulary(model: dict[str, Any]) -> dict[str, int]:
    """Token ids by token: a map for BPE and its kin, a list of (token, score) in id order for Unigram."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):
        return {str(entry[0]): token_id for token_id, entry in enumerate(vocabulary)}
    return {str(token): int(token_id) for token, token_id in vocabulary.items()}


def _decoder_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _decoder_steps(inner)]
    return [decoder]


def _is_byte_level(path: Path, steps: list[dict[str, Any]]) -> bool:
    """True for ByteLevel, False for Metaspace. Raises UnsupportedTokenizerError for anything else."""
    kinds = {str(step["type"]) for step in steps}
    if kinds == {"ByteLevel"}:
        return True
    if _is_metaspace(steps):
        return False
    named = " + ".join(str(step["type"]) for step in steps) or "none"
    raise UnsupportedTokenizerError(f"{path}: decoder {named} is not supported (ByteLevel or Metaspace are)")


def _is_metaspace(steps: list[dict[str, Any]]) -> bool:
    """Whether each token has its own text: what works on the joined text may only strip spaces from its beginning."""
    order = [_METASPACE_STEPS.get(str(step["type"])) for step in steps]
    known = [place for place in order if place is not None]
    strips = [step for step in steps if step["type"] == "Strip"]
    return (
        known == order == sorted(known)
        and any(_space_of(step) for step in steps)
        and all(_space_of(step) for step in steps if step["type"] == "Replace")
        and all((step.get("content"), step.get("stop")) == (" ", 0) for step in strips)
        and (not strips or _JOINING in known)
    )


def _space_of(step: dict[str, Any]) -> str | None:
    """The character that a step turns into a space."""
    if step["type"] == "Metaspace":
        return str(step.get("replacement", _METASPACE))
    is_space = (
        step["type"] == "Replace" and step.get("pattern") == {"String": _METASPACE} and step.get("content") == " "
    )
    return _METASPACE if is_space else None


def _byte_level(token: str) -> bytes:
    """A token with a character outside the alphabet stands for itself, as in the `tokenizers` decoder."""
    mapped = [_ALPHABET.get(character) for character in token]
    known = [byte for byte in mapped if byte is not None]
    return bytes(known) if len(known) == len(mapped) else token.encode()


def _metaspace_decoder(steps: list[dict[str, Any]]) -> Callable[[str], bytes]:
    """Spaces stay where they are, also at the beginning: the text continues a prompt."""
    spaces = str.maketrans({space: " " for step in steps if (space := _space_of(step))})
    has_byte_tokens = any(step["type"] == "ByteFallback" for step in steps)

    def to_bytes(token: str) -> bytes:
        match = _BYTE_TOKEN.fullmatch(token) if has_byte_tokens else None
        return bytes([int(match[1], 16)]) if match else token.translate(spaces).encode()

    return to_bytes
