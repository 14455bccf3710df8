"""Each member of the native family and each rope type against transformers, number for number.

Teacher-forced: the tokens are given, so that no drawn token hides or spreads a difference. Ours run as in service, packed,
in chunks and single rows, over paged KV memory; theirs as one plain forward.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gpu_worker.engine.loading import load_parts
from gpu_worker.engine.settings import EngineSettings
from tests.support.teacher_forcing import PackedLogits, packed_logits
from tests.support.tiny_models import LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE, encode, make_tiny_model

BLOCK_SIZE = 8
CONTEXT_LENGTH = 256
CHUNKS = (1, 1, 21, 1, 5, 1, 1, 2, 1, 1)
# Longer than the windows below and than the original context of the stretched ropes.
SEQUENCES = tuple(
    encode(text)
    for text in (
        "The quick brown fox jumps over the lazy dog and then sleeps in the sun until the evening comes, when it wakes.",
        "0123456789 abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ",
        "Pack my box with five dozen liquor jugs, said the wizard; and quickly, before the judge vexes us all again!",
    )
)
NO_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
HYBRID = {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 11}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A model, and the config fields of the same weights without what it is to show."""

    model_type: str
    fields: dict[str, object] = field(default_factory=dict)
    without: dict[str, object] | None = None
    max_shard_size: str = "5GB"


def llama(**fields):
    return Variant(model_type="llama", fields=fields)


def stretched(model_type, **rope):
    return Variant(model_type=model_type, fields={"rope_parameters": rope}, without={"rope_parameters": NO_ROPE})


VARIANTS = {
    "llama": llama(),
    "llama, tied": llama(tie_word_embeddings=True),
    "llama, multi-head": llama(num_key_value_heads=4),
    "llama, multi-query": llama(num_key_value_heads=1),
    "llama, heads of their own size": llama(head_dim=24),
    "llama, all biases": llama(attention_bias=True, mlp_bias=True),
    "llama, three shards": Variant(model_type="llama", max_shard_size="100KB"),
    "llama, linear": stretched("llama", **LINEAR_ROPE),
    "llama, llama3": stretched("llama", **LLAMA3_ROPE),
    "llama, yarn": stretched("llama", **YARN_ROPE),
    "llama, yarn with limits, not truncated": stretched(
        "llama", **YARN_ROPE, beta_fast=8.0, beta_slow=2.0, truncate=False
    ),
    "llama, yarn with magnitudes": stretched("llama", **YARN_ROPE, mscale=0.7, mscale_all_dim=1.4),
    "llama, yarn with a factor": stretched("llama", **YARN_ROPE, attention_factor=0.75),
    "mistral, window": Variant(model_type="mistral", fields={"sliding_window": 13}, without={"sliding_window": None}),
    "mistral, no window": Variant(model_type="mistral", fields={"sliding_window": None}),
    "qwen2": Variant(model_type="qwen2"),
    "qwen2, window in the last layers": Variant(
        model_type="qwen2", fields={**HYBRID, "max_window_layers": 1}, without={"layer_types": ["full_attention"] * 3}
    ),
    "qwen2, yarn": stretched("qwen2", **YARN_ROPE),
    "qwen3": Variant(model_type="qwen3", fields={"head_dim": 32}),
    "qwen3, windows by layer": Variant(
        model_type="qwen3",
        fields={**HYBRID, "head_dim": 16, "layer_types": ALTERNATING},
        without={"layer_types": ["full_attention"] * 3},
    ),
    "qwen3, bias and yarn": Variant(
        model_type="qwen3",
        fields={"head_dim": 16, "attention_bias": True, "rope_parameters": YARN_ROPE},
        without={"rope_parameters": NO_ROPE},
    ),
    "smollm3": Variant(
        model_type="smollm3",
        fields={"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]},
        without={"no_rope_layers": [1, 1, 1]},
    ),
    "smollm3, windows without rotation": Variant(
        model_type="smollm3",
        fields={**HYBRID, "no_rope_layer_interval": 2, "tie_word_embeddings": True},
        without={"layer_types": ["full_attention"] * 3},
    ),
}


def our_logits(directory: Path, sequences) -> PackedLogits:
    parts = load_parts(directory, EngineSettings(threads=1, num_blocks=64, block_size=BLOCK_SIZE))
    return packed_logits(parts.runner, sequences, block_size=BLOCK_SIZE, chunks=CHUNKS)


def their_logits(directory: Path, sequences, **changes: object) -> list[torch.Tensor]:
    """[tokens, vocab_size] of each sequence."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", **changes
    ).eval()
    with torch.inference_mode():
        return [model(torch.tensor([token_ids]), use_cache=False).logits[0] for token_ids in sequences]


def relative_differences(ours: PackedLogits, theirs: list[torch.Tensor]) -> dict[tuple[int, int], float]:
    """The largest difference at each position, as a share of the largest logit there is."""
    largest = max(float(logits.abs().max()) for logits in theirs)
    return {
        (number, length): float((row - theirs[number][length - 1]).abs().max()) / largest
        for (number, length), row in ours.items()
    }


def assert_equal(ours: PackedLogits, theirs: list[torch.Tensor]) -> None:
    differences = relative_differences(ours, theirs)
    print(f"largest relative difference {max(differences.values()):.1e}")
    assert max(differences.values()) <= 1e-5, max(differences, key=lambda place: differences[place])
    for (number, length), row in ours.items():
        expected = theirs[number][length - 1].log_softmax(-1)
        assert (row.log_softmax(-1) - expected).abs().max() <= 1e-4


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The directory of a variant, and our logits of it."""

    @cache
    def make(name: str) -> tuple[Path, PackedLogits]:
        variant, directory = VARIANTS[name], tmp_path_factory.mktemp("model")
        make_tiny_model(
            directory,
            variant.model_type,
            context_length=CONTEXT_LENGTH,
            max_shard_size=variant.max_shard_size,
            **variant.fields,
        )
        return directory, our_logits(directory, SEQUENCES)

    return make


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_log_probabilities_equal_those_of_transformers(name, made):
    directory, ours = made(name)
    theirs = their_logits(directory, SEQUENCES)
    assert len(ours) > 50
    assert min(logits.std() for logits in theirs) >= 1, "small logits would compare little"
    assert_equal(ours, theirs)


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if variant.without is not None])
def test_a_feature_that_is_ignored_would_be_seen(name, made):
    """The same weights without it give other logits, by far more than the tolerance."""
    directory, ours = made(name)
    differences = relative_differences(ours, their_logits(directory, SEQUENCES, **VARIANTS[name].without))
    assert max(differences.values()) > 1e-2


@pytest.mark.parametrize("name", ["llama, all biases", *(name for name in VARIANTS if "window" in name)])
def test_logits_are_the_same_bits_alone_and_cut_otherwise(name, made):
    directory, together = made(name)
    parts = load_parts(directory, EngineSettings(threads=1, num_blocks=64, block_size=BLOCK_SIZE))
    if not parts.capabilities.is_batch_invariant:
        pytest.skip("this machine has no kernels that are")
    num_compared = 0
    for number, token_ids in enumerate(SEQUENCES):
        alone = packed_logits(parts.runner, [token_ids], block_size=BLOCK_SIZE, chunks=(3, 1, 1, 1, 1, 1))
        for (_, length), row in alone.items():
            if (number, length) in together:
                assert torch.equal(row, together[number, length]), (number, length)
                num_compared += 1
    assert num_compared > 20


def test_several_shards_are_several_files(made):
    directory, _ = made("llama, three shards")
    assert len(list(directory.glob("model-*.safetensors"))) >= 3


TEXT = """The lighthouse keeper counted the ships as they came in from the north. There were eleven of them on the first
evening, nine on the second, and on the third evening none at all, which he wrote down in his book with great care. It was
a quiet winter. The harbour froze twice, and twice the men of the village went out with saws and long poles to cut a way for
the mail boat, whose captain brought oranges, newspapers and a letter from the keeper's sister in Lisbon. She wrote that the
almond trees were already in flower, that the price of coffee had doubled, and that her youngest son wanted to become a
lighthouse keeper too, although nobody had been able to explain to him what the light is for. He answered her on the same
day: tell him that it is for those who are not there yet."""


@pytest.mark.model
def test_smollm2_computes_what_transformers_computes(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    token_ids = tuple(tokenizer(TEXT)["input_ids"])[:200]
    assert len(token_ids) > 150
    sequences = (token_ids, token_ids[60:140])
    parts = load_parts(smollm2, EngineSettings(threads=1, num_blocks=512, block_size=16))
    ours = packed_logits(parts.runner, sequences, block_size=16, chunks=(33, 1, 14, 1, 1, 2, 1))
    assert_equal(ours, their_logits(smollm2, sequences))
