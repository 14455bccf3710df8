"""A scripted service, and a client whose time the test moves."""

from collections.abc import AsyncIterator
from datetime import timedelta

import grpc
import pytest

from inference.v1 import inference_pb2_grpc
from sluice.client import ClientSettings, SluiceClient
from sluice.retry import RetryPolicy
from tests.integration.client.steps import FakeTime
from tests.support.scripted_service import ScriptedService


@pytest.fixture
async def service() -> AsyncIterator[ScriptedService]:
    server = grpc.aio.server()
    servicer = ScriptedService()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    servicer.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield servicer
    await server.stop(None)


@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


@pytest.fixture
async def client(service: ScriptedService, time: FakeTime) -> AsyncIterator[SluiceClient]:
    settings = ClientSettings(
        targets=(service.target,),
        api_key="key-1",
        retry=RetryPolicy(
            first_delay=timedelta(seconds=1), max_delay=timedelta(seconds=4), give_up_after=timedelta(seconds=10)
        ),
    )
    async with SluiceClient(settings, sleep=time.sleep, clock=time.clock, draw=lambda: 0.0) as opened:
        yield opened
