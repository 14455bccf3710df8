"""The small real model, for the tests marked `model`: fetched once into the local model cache."""

import subprocess
import sys
from pathlib import Path

import pytest

NAME = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The model's directory; `sluice models pull` puts it there when it is absent."""
    subprocess.run(  # the command that a person would use
        [sys.executable, "-m", "sluice", "models", "pull", NAME], check=True, capture_output=True, timeout=300
    )
    return Path(".sluice/models").absolute() / NAME
