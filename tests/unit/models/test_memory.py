"""How much memory a loaded model takes. Its sizes are large beside what the interpreter and the allocator do meanwhile."""

import ctypes
import gc
import mmap
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gpu_worker.layers.linear.factory import LinearFactory
from gpu_worker.models.config import parse_model_config
from gpu_worker.models.llama import LlamaModel
from gpu_worker.models.llama_tensors import tensor_shapes
from tests.unit.models.test_model_config import BASE

SIZES = {
    "vocab_size": 6144,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


def resident_bytes():
    """What this process holds in memory, pages of mapped files included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def settle():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="module")
def make_model(tmp_path_factory):
    """The config and directory of a model, and the size of its weights. What libraries take once, they have taken before."""

    def make(**fields):
        config, directory = parse_model_config({**BASE, **SIZES, **fields}), tmp_path_factory.mktemp("model")
        tensors = {name: torch.zeros(shape) for name, shape in tensor_shapes(config).items()}
        save_file(tensors, directory / "model.safetensors")
        return config, directory, sum(tensor.nbytes for tensor in tensors.values())

    config, directory, _ = make(num_hidden_layers=1)
    LlamaModel.load(directory, config, device=torch.device("cpu"), dtype=torch.float32)
    return make


class Watched:
    """Implements MakeLinear and looks at the memory after each product that was made."""

    def __init__(self, *, is_hoarding=False):
        self._make = LinearFactory()
        self._hoard = [] if is_hoarding else None
        self.highest = 0

    def __call__(self, weight, bias, scale=None):
        linear = self._make(weight, bias, scale)
        assert linear.name == "fp32"
        if self._hoard is not None:
            self._hoard.append(weight)
        self.highest = max(self.highest, resident_bytes())
        return linear


def load(config, directory, make_linear):
    """The model, what it holds in the end, and the most that was held meanwhile."""
    settle()
    before = resident_bytes()
    model = LlamaModel.load(directory, config, device=torch.device("cpu"), dtype=torch.float32, make_linear=make_linear)
    settle()
    return model, resident_bytes() - before, make_linear.highest - before


def test_a_loaded_model_holds_its_weights_once_and_little_more_meanwhile(make_model):
    config, directory, num_bytes = make_model(tie_word_embeddings=False)
    model, held, highest = load(config, directory, Watched())
    assert model.is_batch_invariant
    assert 0.9 * num_bytes < held < 1.15 * num_bytes
    assert highest < 1.6 * num_bytes


def test_a_tied_embedding_is_held_twice_and_nothing_else(make_model):
    """To be looked up, and packed as the head."""
    config, directory, num_bytes = make_model(tie_word_embeddings=True)
    embedding_bytes = 4 * config.vocab_size * config.hidden_size
    _, held, highest = load(config, directory, Watched())
    assert held < 1.15 * num_bytes + embedding_bytes
    assert highest < 1.6 * num_bytes + embedding_bytes


def test_weights_that_are_kept_beside_the_packed_ones_would_be_seen(make_model):
    config, directory, num_bytes = make_model(tie_word_embeddings=False)
    hoarding = Watched(is_hoarding=True)
    _, held, _ = load(config, directory, hoarding)
    assert held > 1.6 * num_bytes
