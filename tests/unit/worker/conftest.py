import pytest

from gpu_worker.engine.simulated import SimulatedEngine, SimulatedWorld, load_simulated_engine
from gpu_worker.engine.simulated_settings import SimulatedSettings
from tests.support.tiny_models import make_simulated_model
from tests.unit.worker.simulated_world import World


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "sim"
    make_simulated_model(path, context_length=256)
    return path


@pytest.fixture
def world():
    return World()


@pytest.fixture
def make_engine(directory, world):
    def make(**settings) -> SimulatedEngine:
        given_world = SimulatedWorld(clock=lambda: world.now, sleep=world.sleep, exit_process=world.exit)
        return load_simulated_engine(directory, settings=SimulatedSettings(**settings), world=given_world)

    return make
