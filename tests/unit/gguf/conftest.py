"""A tiny model, and the bytes of a GGUF file of it."""

from pathlib import Path

import pytest

from gpu_worker.artifacts.simulated_model import VOCAB_SIZE
from tests.support.gguf_files import write_gguf
from tests.support.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_tiny_model(directory, "llama", vocab_size=VOCAB_SIZE + 1, num_hidden_layers=1)
    return directory


@pytest.fixture(scope="module")
def whole(model) -> bytes:
    write_gguf(model / "whole.gguf", model)
    return (model / "whole.gguf").read_bytes()
