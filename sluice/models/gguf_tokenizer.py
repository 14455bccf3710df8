"""Turns the tokenizer inside a GGUF file into tokenizer.json and tokenizer_config.json.

Only byte-level BPE ("gpt2"), and only with a pre-tokenizer whose rules stand in the table below: a wrong split of words
gives other ids without any error.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence
from tokenizers.processors import TemplateProcessing

from sluice.errors import UserError
from sluice.models.gguf_llama import GgufFile

_CONTROL, _USER_DEFINED = 3, 4


def write_tokenizer(gguf: GgufFile, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, chat template included. Raises UserError."""
    if gguf.field("tokenizer.ggml.model") != "gpt2":
        raise UserError("only byte-level BPE tokenizers can be converted")
    tokens: list[str] = gguf.field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in gguf.field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(gguf.optional_field("tokenizer.ggml.pre", "gpt-2"))
    tokenizer.decoder = ByteLevelDecoder()
    kinds = gguf.field("tokenizer.ggml.token_type")
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens([token for token in added if not token.special])
    tokenizer.add_special_tokens([token for token in added if token.special])
    if gguf.optional_field("tokenizer.ggml.add_bos_token", default=False):
        bos = tokens[gguf.field("tokenizer.ggml.bos_token_id")]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(gguf, tokens), indent=2) + "\n")


def _tokenizer_config(gguf: GgufFile, tokens: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(gguf.field("llama.context_length")),
        "chat_template": gguf.field("tokenizer.chat_template"),
    }
    for role, field in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = gguf.optional_field(f"tokenizer.ggml.{field}_token_id", None)
        if token_id is not None:
            config[f"{role}_token"] = tokens[token_id]
    return config


def _pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer that GGUF calls `name`. Raises UserError for an unknown one."""
    byte_level = ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("smollm", "starcoder", "refact", "command-r"):
        return Sequence([Digits(individual_digits=True), byte_level])
    if name in ("gpt-2", "default"):
        return byte_level
    raise UserError(f"the word splitting {name!r} of this file is not known; it cannot be converted")
