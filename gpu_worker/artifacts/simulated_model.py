"""Writes the model directory of the simulated engine: a byte-level tokenizer and a manifest, no weights."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

from service_kit.model_manifest import ModelManifest, content_revision

BOS_TOKEN = "<|bos|>"  # noqa: S105 - the text of a special token, not a password
EOS_TOKEN = "<|eos|>"  # noqa: S105
NUM_BYTES = 256
BOS_TOKEN_ID = NUM_BYTES
EOS_TOKEN_ID = NUM_BYTES + 1
VOCAB_SIZE = NUM_BYTES + 2
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's `bytes_to_unicode`)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    characters: list[str] = []
    num_moved = 0
    for byte in range(NUM_BYTES):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(NUM_BYTES + num_moved))
            num_moved += 1
    return characters


def write_byte_tokenizer(directory: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json (chat template) and generation_config.json.

    Token i below 256 is byte i; then BOS and EOS. Encoding plain text puts one BOS in front, as the template does.
    """
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(BOS_TOKEN, special=True), AddedToken(EOS_TOKEN, special=True)])
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS_TOKEN} $A",
        pair=f"{BOS_TOKEN} $A {BOS_TOKEN} $B",
        special_tokens=[(BOS_TOKEN, BOS_TOKEN_ID)],
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS_TOKEN,
        "eos_token": EOS_TOKEN,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    generation_config = {"bos_token_id": BOS_TOKEN_ID, "eos_token_id": EOS_TOKEN_ID}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(generation_config, indent=2) + "\n")


def write_simulated_model(directory: Path, *, name: str, context_length: int) -> ModelManifest:
    """Makes `directory` a model of precision "sim" with a byte-level tokenizer; returns its manifest."""
    directory.mkdir(parents=True, exist_ok=True)
    write_byte_tokenizer(directory)
    # It has no weights that would tell it from another one: the name is what it is, and so part of the revision.
    (directory / "simulated.json").write_text(json.dumps({"model": name}) + "\n")
    manifest = ModelManifest(
        model=name,
        revision=content_revision(directory),
        precision="sim",
        context_length=context_length,
        vocab_size=VOCAB_SIZE,
        bos_token_id=BOS_TOKEN_ID,
        eos_token_ids=(EOS_TOKEN_ID,),
    )
    manifest.write(directory)
    return manifest
