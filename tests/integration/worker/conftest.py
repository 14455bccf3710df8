from datetime import timedelta

import pytest

from tests.integration.worker.scripted_scheduler import AnnouncementDesk
from tests.support.tiny_models import make_simulated_model


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "sim"
    make_simulated_model(path, context_length=4096)
    return path


@pytest.fixture
async def desks():
    """Two schedulers: the desks and their addresses."""
    epochs = iter(range(1, 1000))
    made = [AnnouncementDesk(epochs), AnnouncementDesk(epochs)]
    served = [await desk.serve() for desk in made]
    yield made, [address for _, address in served]
    for desk in made:
        await desk.close()
    for server, _ in served:
        await server.stop(timedelta(0))
