from datetime import timedelta

import pytest

from gpu_worker.service import WorkerServicer
from inference.internal.v1 import worker_pb2_grpc
from service_kit.grpc_server import GrpcServer
from tests.integration.worker.scripted_scheduler import AnnouncementDesk
from tests.integration.worker.session_setup import Setup
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


@pytest.fixture
async def serve(model_directory):
    servers = []

    async def start(*, access=None, **settings) -> Setup:
        setup = Setup(model_directory, **settings)
        servicer = WorkerServicer(current_session=lambda: setup.session)
        server = GrpcServer(
            listen="127.0.0.1:0",
            services={
                "inference.internal.v1.WorkerService": lambda target: (
                    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, target)
                )
            },
            authorize=access.authorize if access is not None else None,
        )
        setup.address = f"127.0.0.1:{await server.start()}"
        servers.append(server)
        return setup

    yield start
    for server in servers:
        await server.stop(timedelta(0))


@pytest.fixture
async def setup(serve):
    return await serve()
