"""Whoever is refused is counted, by reason."""

from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, NumberDataPoint

from inference.internal.v1 import scheduler_pb2, scheduler_pb2_grpc
from inference.v1 import inference_pb2, types_pb2
from service_kit.api_key import mint_api_key
from service_kit.errors import UnavailableError
from service_kit.grpc_client import open_channel
from service_kit.grpc_server import GrpcServer
from service_kit.internal_access import InternalAccess
from service_kit.metrics import count_error, setup_metrics
from state_store.quota.memory import MemoryQuota
from state_store.tenant_store import TenantChange
from state_store.tenants import QuotaLimits
from tests.support.gateway import GatewayRig, bearer, running_gateway
from tests.support.polling import eventually
from tests.support.tenants import ACTOR

READER = InMemoryMetricReader()


@pytest.fixture(scope="module", autouse=True)
def _reading() -> None:
    """The provider is the process's, for ever."""
    setup_metrics(service_name="tests", reader=READER)


@pytest.fixture
async def limited(tmp_path: Path) -> AsyncIterator[GatewayRig]:
    """One request a minute."""
    quota = MemoryQuota(lambda: datetime.now(UTC))
    assert await quota.begin_rebuild()
    await quota.mark_ready()
    async with running_gateway(tmp_path, quota=quota) as gateway:
        (tenant,) = await gateway.scheduler.store.list_tenants(after=None, limit=9)
        change = TenantChange(limits=QuotaLimits(requests_per_minute=1))
        await gateway.scheduler.store.update_tenant(tenant.tenant_id, change, actor=ACTOR)
        yield gateway


def counted() -> Counter[str]:
    """Calls so far, by reason."""
    data = READER.get_metrics_data()
    points = [
        point
        for resource in (data.resource_metrics if data is not None else ())
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == "sluice.rpc.errors"
        for point in metric.data.data_points
        if isinstance(point, NumberDataPoint)
    ]
    assert all(set(point.attributes or {}) == {"reason"} for point in points)
    return Counter({str((point.attributes or {})["reason"]): int(point.value) for point in points})


async def code_of(call: Any) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def create(prompt: str = "ab", model: str = "simulated") -> inference_pb2.CreateGenerationRequest:
    return inference_pb2.CreateGenerationRequest(spec=types_pb2.GenerationSpec(model=model, prompt=prompt))


async def test_each_refusal_of_a_gateway_counts_once_under_its_reason(limited: GatewayRig) -> None:
    before, stub = counted(), limited.stub
    guess, _ = mint_api_key()
    assert await code_of(stub.CreateGeneration(create())) is grpc.StatusCode.UNAUTHENTICATED
    for _ in range(9):
        assert await code_of(stub.CreateGeneration(create(), metadata=bearer(guess))) is grpc.StatusCode.UNAUTHENTICATED
    refused = [await code_of(stub.CreateGeneration(create(), metadata=bearer(guess))) for _ in range(4)]
    assert refused == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 4
    assert await code_of(stub.CreateGeneration(create(model="no"), metadata=limited.auth)) is grpc.StatusCode.NOT_FOUND
    limited.scheduler.refusal = UnavailableError("full", reason="QUEUE_FULL")
    assert await code_of(stub.CreateGeneration(create(), metadata=limited.auth)) is grpc.StatusCode.UNAVAILABLE
    limited.scheduler.refusal = None
    huge = stub.CreateGeneration(create("a" * (12 << 20)), metadata=limited.auth)
    assert await code_of(huge) is grpc.StatusCode.RESOURCE_EXHAUSTED
    # The scheduler of this process counts what it refuses, as the gateway does what it passes on.
    expected = {
        "INVALID_API_KEY": 10, "TOO_MANY_BAD_KEYS": 4, "MODEL_NOT_FOUND": 1, "QUEUE_FULL": 2, "NO_MESSAGE": 1
    }  # fmt: skip
    await eventually(lambda: counted() - before == expected)


async def test_a_limit_that_is_reached_counts_and_what_is_served_does_not(limited: GatewayRig) -> None:
    before = counted()
    assert await code_of(limited.stub.CreateGeneration(create(), metadata=limited.auth)) is grpc.StatusCode.OK
    assert counted() == before
    for _ in range(2):
        refused = limited.stub.CreateGeneration(create(), metadata=limited.auth)
        assert await code_of(refused) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert counted() - before == {"QUOTA_EXCEEDED": 2}


async def test_a_plain_client_on_an_internal_port_counts(limited: GatewayRig) -> None:
    before, access = counted(), InternalAccess(token="t" * 32)
    register = scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server
    server = GrpcServer(
        listen="127.0.0.1:0",
        services={"scheduler": lambda server: register(limited.scheduler, server)},
        authorize=access.authorize,
    )
    channel = open_channel(f"127.0.0.1:{await server.start()}")
    stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel)
    assert await code_of(stub.Cancel(scheduler_pb2.CancelRequest())) is grpc.StatusCode.UNAUTHENTICATED
    await channel.close(None)
    await server.stop(timedelta(0))
    assert (counted() - before).total() == 1


def test_words_that_are_none_of_ours_share_one_label() -> None:
    before = counted()
    for reason in ("chosen-by-a-peer", "another"):
        count_error(reason)
    assert counted() - before == {"OTHER": 2}
