"""Models from GGUF files against transformers with the weights that the files stand for, number for number."""

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM

from gpu_worker.artifacts.simulated_model import VOCAB_SIZE
from gpu_worker.engine.loading import load_parts
from gpu_worker.engine.settings import EngineSettings
from tests.support.gguf_files import KindOf, all_f32, everything, q4_k_m, write_gguf
from tests.support.teacher_forcing import packed_logits
from tests.support.tiny_models import LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE, encode, make_tiny_model

BLOCK_SIZE = 8
TOKENS = encode(
    "Pack my box with five dozen liquor jugs, said the wizard; and quickly, before the judge vexes us again!"
)
# Rows of 256 numbers, which K types store together.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
TYPES = {
    kind.name: everything(kind)
    for kind in (
        Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K,
    )
}  # fmt: skip
MODELS = {
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, heads of their own size": ("llama", {"head_dim": 24}),
    "llama, linear": ("llama", {"rope_parameters": LINEAR_ROPE}),
    "llama, llama3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, yarn": ("llama", {"rope_parameters": YARN_ROPE}),
    "mistral, window": ("mistral", {"sliding_window": 13}),
    "qwen2": ("qwen2", {}),
    "qwen2, yarn": ("qwen2", {"rope_parameters": YARN_ROPE, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
}


def assert_computes_what_the_directory_does(file: Path, directory: Path) -> None:
    """Every row, packed in chunks, within 1e-5 of the largest logit. Theirs in double precision: of random weights of 256
    columns the rounding of their own single precision may be more than that."""
    parts = load_parts(file, EngineSettings(threads=1, num_blocks=64, block_size=BLOCK_SIZE))
    ours = packed_logits(parts.runner, [TOKENS, TOKENS[::-1]], block_size=BLOCK_SIZE, chunks=(1, 40, 1, 9))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager").eval()
    with torch.inference_mode():
        theirs = [model(torch.tensor([each]), use_cache=False).logits[0] for each in (TOKENS, TOKENS[::-1])]
    largest = max(float(logits.abs().max()) for logits in theirs)
    assert min(logits.std() for logits in theirs) >= 0.3, "small logits would compare little"
    differences = {
        place: float((row - theirs[place[0]][place[1] - 1]).abs().max()) / largest for place, row in ours.items()
    }
    assert len(differences) > 10
    assert max(differences.values()) <= 1e-5


def make(tmp_path: Path, model_type: str, *, kind_of: KindOf = all_f32, **fields: object) -> tuple[Path, Path]:
    make_tiny_model(tmp_path / "model", model_type, vocab_size=VOCAB_SIZE + 1, **fields)
    write_gguf(tmp_path / "tiny.gguf", tmp_path / "model", kind_of=kind_of)
    return tmp_path / "tiny.gguf", tmp_path / "model"


@pytest.mark.parametrize("name", TYPES)
def test_every_type_of_weights_gives_the_logits_of_the_dequantized_ones(name, tmp_path):
    assert_computes_what_the_directory_does(*make(tmp_path, "llama", kind_of=TYPES[name], num_hidden_layers=1, **WIDE))


def test_a_file_of_mixed_types_as_q4_k_m_has_them_gives_the_logits_of_the_dequantized_weights(tmp_path):
    assert_computes_what_the_directory_does(*make(tmp_path, "llama", kind_of=q4_k_m, **WIDE))


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_and_rope_type_gives_the_logits_of_transformers(name, tmp_path):
    model_type, fields = MODELS[name]
    assert_computes_what_the_directory_does(*make(tmp_path, model_type, **fields))


@pytest.mark.parametrize("alignment", [4, 128])
def test_numbers_are_found_where_the_alignment_of_the_file_puts_them(alignment, tmp_path):
    make_tiny_model(tmp_path / "model", "llama", vocab_size=VOCAB_SIZE + 1)
    write_gguf(tmp_path / "tiny.gguf", tmp_path / "model", changes={"general.alignment": alignment})
    assert_computes_what_the_directory_does(tmp_path / "tiny.gguf", tmp_path / "model")


def test_a_split_model_is_read_from_all_its_parts(tmp_path):
    make_tiny_model(tmp_path / "model", "llama", vocab_size=VOCAB_SIZE + 1)
    write_gguf(tmp_path / "tiny.gguf", tmp_path / "model", split_max_tensors=8)
    first = tmp_path / "tiny-00001-of-00003.gguf"
    assert len(list(tmp_path.glob("tiny-*.gguf"))) == 3
    assert_computes_what_the_directory_does(first, tmp_path / "model")
