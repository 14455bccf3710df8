"""How the byte-level vocabularies of GGUF files split text into words, by the name in `tokenizer.ggml.pre`. Pure.

Names as in llama.cpp (src/llama-vocab.cpp), rules as in the tokenizer.json of the models that the names come from. Only
what is known to be right: other rules give other ids without any error.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BY_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    r"%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGIT = r"\p{N}"
_THREE_DIGITS, _ONE_DIGIT = _BY_WORDS % r"\p{N}{1,3}", _BY_WORDS % _DIGIT
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BY_CASE = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


@dataclass(frozen=True, slots=True, kw_only=True)
class WordSplitting:
    """One way to split.

    patterns: each splits what those before it left. has_gpt2_pattern: whether GPT-2's splits the rest. ignores_merges:
    whether a word that is a token is that token, however its parts would merge. composes: whether text is brought to the
    normal form NFC before. begins_with_bos: whether files that do not say so mean a BOS token.
    """

    patterns: tuple[str, ...] = ()
    has_gpt2_pattern: bool = False
    ignores_merges: bool = False
    composes: bool = False
    begins_with_bos: bool = False

    def steps(self, *, adds_space: bool) -> dict[str, Any]:
        """The pre-tokenizer of a tokenizer.json."""
        splits = [_split_step(pattern) for pattern in self.patterns]
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": adds_space,
            "trim_offsets": True,
            "use_regex": self.has_gpt2_pattern,
        }
        return {"type": "Sequence", "pretokenizers": [*splits, byte_level]} if splits else byte_level


def _split_step(pattern: str) -> dict[str, Any]:
    if pattern == _DIGIT:
        return {"type": "Digits", "individual_digits": True}
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_GPT2_WORDS = WordSplitting(has_gpt2_pattern=True)
_SINGLE_DIGITS = WordSplitting(patterns=(_DIGIT,), has_gpt2_pattern=True)
_LLAMA3 = WordSplitting(patterns=(_THREE_DIGITS,), ignores_merges=True, begins_with_bos=True)

WORD_SPLITTINGS: Mapping[str, WordSplitting] = {
    "gpt-2": _GPT2_WORDS,
    "phi-2": _GPT2_WORDS,
    "default": WordSplitting(patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": WordSplitting(patterns=(_THREE_DIGITS,)),
    "qwen2": WordSplitting(patterns=(_ONE_DIGIT,), composes=True),
    "deepseek-r1-qwen": WordSplitting(patterns=(_ONE_DIGIT,)),
    "deepseek-coder": WordSplitting(patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGIT)),
    "tekken": WordSplitting(patterns=(_BY_CASE,), ignores_merges=True, begins_with_bos=True),
}
