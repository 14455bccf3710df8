"""The tokenizer inside a GGUF file, as the documents that Hugging Face's `tokenizers` and transformers read. Pure.

Two kinds: byte-level BPE ("gpt2") and SentencePiece's BPE ("llama"). The pieces of a SentencePiece model merge in
the order of the tokens' scores, as in the tokenizer.json that transformers makes of the same model.
"""

from typing import Any

from service_kit.gguf.header import GgufHeader
from service_kit.gguf.identity import context_length
from service_kit.gguf.pre_tokenizers import WORD_SPLITTINGS, WordSplitting
from service_kit.gguf.vocabulary import SPECIAL, TokenKind, Vocabulary, read_vocabulary

_MODEL, _PRE, _MERGES = "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.merges"
_SCORES, _ADDS_SPACE = "tokenizer.ggml.scores", "tokenizer.ggml.add_space_prefix"
_TEMPLATE = "tokenizer.chat_template"
_SPACE = "▁"
_MERGED_KINDS = frozenset({TokenKind.NORMAL, TokenKind.USER_DEFINED})


def tokenizer_document(header: GgufHeader) -> dict[str, Any]:
    """What tokenizer.json holds. Raises GgufError."""
    vocabulary = read_vocabulary(header)
    match header.text(_MODEL):
        case "gpt2":
            parts = _byte_level(header, vocabulary)
        case "llama":
            parts = _sentence_piece(header, vocabulary)
        case other:
            raise header.unsupported(
                _MODEL, f"{other!r} is not read, only gpt2 (byte-level BPE) and llama (SentencePiece)"
            )
    added = [
        _added_token(token_id, token, is_special=kind in SPECIAL)
        for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind in SPECIAL or kind == TokenKind.USER_DEFINED
    ]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts}


def tokenizer_config(header: GgufHeader) -> dict[str, Any]:
    """What tokenizer_config.json holds: special tokens and chat template. Raises GgufError."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length(header),
    }
    if _TEMPLATE in header.metadata:
        config["chat_template"] = header.text(_TEMPLATE)
    return config | read_vocabulary(header).special_texts(header)


def _byte_level(header: GgufHeader, vocabulary: Vocabulary) -> dict[str, Any]:
    splitting = _word_splitting(header)
    merges = [merge.split(" ", 1) for merge in header.texts(_MERGES)]
    if any(len(merge) != 2 for merge in merges):  # noqa: PLR2004 - a pair
        raise header.refuse(_MERGES, "has an entry that is not two parts with a space between them")
    return {
        "normalizer": {"type": "NFC"} if splitting.composes else None,
        "pre_tokenizer": splitting.steps(adds_space=header.flag(_ADDS_SPACE, default=False)),
        "post_processor": _surroundings(header, vocabulary, has_bos=splitting.begins_with_bos),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(vocabulary, merges, ignore_merges=splitting.ignores_merges),
    }


def _word_splitting(header: GgufHeader) -> WordSplitting:
    name = header.text(_PRE)
    if name not in WORD_SPLITTINGS:
        raise header.unsupported(
            _PRE,
            f"the word splitting {name!r} is not known, only {', '.join(WORD_SPLITTINGS)}; use the safetensors files",
        )
    return WORD_SPLITTINGS[name]


def _sentence_piece(header: GgufHeader, vocabulary: Vocabulary) -> dict[str, Any]:
    adds_space = header.flag(_ADDS_SPACE, default=True)
    has_bytes = TokenKind.BYTE in vocabulary.kinds
    unknown = vocabulary.special_texts(header).get("unk_token")
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if adds_space else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if adds_space else []
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*prepend, {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}],
        },
        "pre_tokenizer": None,
        "post_processor": _surroundings(header, vocabulary, has_bos=True),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                *([{"type": "ByteFallback"}] if has_bytes else []),
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": _bpe(
            vocabulary,
            _merges_by_score(vocabulary, header.numbers(_SCORES, len(vocabulary.tokens))),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=has_bytes,
        ),
    }


def _merges_by_score(vocabulary: Vocabulary, scores: list[float]) -> list[list[str]]:
    """Every way to make a token of two others: those of the best tokens first (transformers, `generate_merges`)."""
    ids = vocabulary.id_by_token
    is_merged = [kind in _MERGED_KINDS for kind in vocabulary.kinds]
    found: list[tuple[float, int, int, int, str, str]] = []
    for token_id, token in enumerate(vocabulary.tokens):
        if vocabulary.kinds[token_id] != TokenKind.NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            left_id, right_id = ids.get(left), ids.get(right)
            if left_id is not None and right_id is not None and is_merged[left_id] and is_merged[right_id]:
                found.append((-scores[token_id], token_id, left_id, right_id, left, right))
    found.sort(key=lambda merge: (merge[0], -len(merge[4]), -len(merge[5]), *merge[1:4]))
    return [[left, right] for *_, left, right in found]


def _bpe(vocabulary: Vocabulary, merges: list[list[str]], **options: Any) -> dict[str, Any]:
    neutral = {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return {"type": "BPE", **neutral, **options, "vocab": vocabulary.id_by_token, "merges": merges}


def _added_token(token_id: int, token: str, *, is_special: bool) -> dict[str, Any]:
    places = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": token, **places, "special": is_special}


def _surroundings(header: GgufHeader, vocabulary: Vocabulary, *, has_bos: bool) -> dict[str, Any] | None:
    """The post-processor that puts BOS before a text and EOS behind it, as the file says; `has_bos` if it does not say."""
    wanted = {
        "bos_token_id": header.flag("tokenizer.ggml.add_bos_token", default=has_bos),
        "eos_token_id": header.flag("tokenizer.ggml.add_eos_token", default=False),
    }
    ids = {key: header.whole(f"tokenizer.ggml.{key}") for key, is_wanted in wanted.items() if is_wanted}
    if not ids:
        return None
    texts = {key: vocabulary.token(header, key, token_id) for key, token_id in ids.items()}

    def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
        middle = {"Sequence": {"id": sequence, "type_id": type_id}}
        marks = {key: {"SpecialToken": {"id": text, "type_id": type_id}} for key, text in texts.items()}
        whole = [marks.get("bos_token_id"), middle, marks.get("eos_token_id")]
        return [piece for piece in whole if piece is not None]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {text: {"id": text, "ids": [ids[key]], "tokens": [text]} for key, text in texts.items()},
    }
