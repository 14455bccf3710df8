import pytest

from tests.support.tiny_models import make_simulated_model


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "sim"
    make_simulated_model(path, context_length=4096)
    return path
