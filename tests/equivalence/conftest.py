"""Tiny models that several tests share."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.support.tiny_decoders import SERVED, make_tiny_decoder


@pytest.fixture(scope="session")
def made_decoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a served model of `tiny_decoders`, which is made once and left as it is."""

    @cache
    def make(name: str) -> Path:
        directory = tmp_path_factory.mktemp("decoder")
        make_tiny_decoder(directory, *SERVED[name])
        return directory

    return make
