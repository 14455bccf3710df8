"""The tokens of a GGUF file with their kinds, and what stands around a text. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from service_kit.gguf.header import GgufHeader

_PREFIX = "tokenizer.ggml."
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # spelt so in the format
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
# Tokens that end an output in models whose files name but one of them; as in llama.cpp.
_END_TEXTS = frozenset(
    {
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>",
        "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)  # fmt: skip


class TokenKind(IntEnum):
    """`llama_token_type` of llama.cpp."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


SPECIAL = frozenset({TokenKind.CONTROL, TokenKind.UNKNOWN})
"""Kinds of tokens that stand for no text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Tokens by id, each text once."""

    tokens: list[str]
    kinds: list[int]
    id_by_token: Mapping[str, int]

    def special_texts(self, header: GgufHeader) -> dict[str, str]:
        """The texts that chat templates name, by the names there (bos_token, eos_token)."""
        ids = {role: header.whole_or_none(_PREFIX + key) for role, key in _ROLES.items()}
        return {
            role: self.token(header, _ROLES[role], token_id) for role, token_id in ids.items() if token_id is not None
        }

    def token(self, header: GgufHeader, key: str, token_id: int) -> str:
        """The token with an id that a key names. Raises GgufError for one that is not there."""
        if token_id >= len(self.tokens):
            raise header.refuse(_PREFIX + key, f"{token_id} is not an id of the {len(self.tokens)} tokens")
        return self.tokens[token_id]

    def bos_id(self, header: GgufHeader) -> int | None:
        """Raises GgufError for one that is not there."""
        token_id = header.whole_or_none(_PREFIX + "bos_token_id")
        if token_id is not None:
            self.token(header, "bos_token_id", token_id)
        return token_id

    def end_ids(self, header: GgufHeader) -> tuple[int, ...]:
        """Ids of the tokens that end an output, ascending: those that the file names, and those with a well-known text."""
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        named = {key: header.whole_or_none(_PREFIX + key) for key in keys}
        for key, token_id in named.items():
            if token_id is not None:
                self.token(header, key, token_id)
        known = {
            token_id
            for token_id, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind == TokenKind.CONTROL and token in _END_TEXTS
        }
        return tuple(sorted(known | {token_id for token_id in named.values() if token_id is not None}))


def read_vocabulary(header: GgufHeader) -> Vocabulary:
    """Raises GgufError."""
    key = "tokenizer.ggml.tokens"
    tokens = header.texts(key)
    if not tokens:
        raise header.refuse(key, "empty")
    id_by_token = {token: token_id for token_id, token in enumerate(tokens)}
    if len(id_by_token) != len(tokens):
        twice = next(token for token_id, token in enumerate(tokens) if id_by_token[token] != token_id)
        raise header.refuse(key, f"has {twice!r} twice")
    kinds_key = "tokenizer.ggml.token_type"
    if kinds_key in header.metadata:
        kinds = header.wholes(kinds_key, len(tokens))
    else:
        kinds = [int(TokenKind.NORMAL)] * len(tokens)
    return Vocabulary(tokens=tokens, kinds=kinds, id_by_token=id_by_token)
