"""`python -m gateway` as a process, over real Postgres and Valkey."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from inference.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from service_kit.api_key import mint_api_key
from service_kit.grpc_client import open_channel
from service_kit.rpc_status import parse_rpc_error
from sluice.local.postgres import LocalPostgres
from sluice.local.valkey import LocalValkey
from state_store.delta_log.connection import connect_redis
from state_store.postgres.migrate import upgrade
from state_store.postgres.store import PostgresStore
from state_store.quota.redis_quota import RedisQuota
from tests.support.gateway import bearer
from tests.support.tenants import add_tenant, store_key
from tests.support.tiny_models import make_simulated_model

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def gateway_process(environment: dict[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", env={**os.environ, **environment}, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        # Reads the pipe to its end, too.
        await process.communicate()


async def wait_for_health(stub: Any, expected: int) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
                if answer.status == expected:
                    return
            except grpc.aio.AioRpcError as error:
                if error.code() not in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
                    raise
            await asyncio.sleep(0.05)


async def make_key(dsn: str) -> str:
    text, presented = mint_api_key()
    store = PostgresStore(dsn)
    await store.open()
    await add_tenant(store, "t")
    await store_key(store, "t", presented, key_id="k")
    await store.close()
    return text


async def make_quotas_ready(url: str) -> None:
    """As a scheduler does."""
    redis = connect_redis(url)
    quota = RedisQuota(redis)
    if await quota.begin_rebuild():
        await quota.mark_ready()
    await redis.aclose()


async def test_a_process_waits_for_its_schema_serves_and_ends_on_sigterm(
    postgres_server: LocalPostgres, valkey_server: LocalValkey, tmp_path: Path
) -> None:
    dsn = postgres_server.create_database("gateway_process")
    port = free_port()
    make_simulated_model(tmp_path / "models" / "simulated")
    environment = {
        "SLUICE_POSTGRES_DSN": dsn,
        "SLUICE_REDIS_URL": valkey_server.url,
        "SLUICE_GATEWAY_LISTEN": f"127.0.0.1:{port}",
        "SLUICE_SCHEDULERS": f"127.0.0.1:{free_port()}",
        "SLUICE_INTERNAL_TOKEN": "token",
        "SLUICE_MODELS_DIR": str(tmp_path / "models"),
        "SLUICE_TRACE_DIR": str(tmp_path / "traces"),
    }
    async with gateway_process(environment) as process:
        channel = open_channel(f"127.0.0.1:{port}")
        health: Any = health_pb2_grpc.HealthStub(channel)
        await wait_for_health(health, NOT_SERVING)
        await asyncio.to_thread(upgrade, dsn)
        await wait_for_health(health, SERVING)
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        auth = bearer(await make_key(dsn))
        await make_quotas_ready(valkey_server.url)
        models = await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=auth, timeout=20)
        assert [model.model for model in models.models] == ["simulated"]
        request = inference_pb2.GenerateRequest(spec=types_pb2.GenerationSpec(model="simulated", prompt="hi"))
        call = stub.Generate(request, metadata=(*auth, ("traceparent", TRACEPARENT)), timeout=20)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        failure = parse_rpc_error(caught.value)
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_SCHEDULER")
        await channel.close(None)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            _, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
    events = [json.loads(line)["event"] for line in errors.decode().splitlines()]
    assert events[-1] == "gateway_stopped"
    assert_one_trace(tmp_path / "traces")


def assert_one_trace(directory: Path) -> None:
    """The call's spans hang together under the caller's."""
    (path,) = directory.iterdir()
    spans = {span["name"]: span for span in map(json.loads, path.read_text().splitlines())}
    assert set(spans) == {"gateway.generate", "gateway.tokenize", "gateway.submit"}
    assert {span["trace_id"] for span in spans.values()} == {TRACE_ID}
    root = spans["gateway.generate"]
    assert root["parent_id"] == TRACEPARENT.split("-")[2]
    for name in ("gateway.tokenize", "gateway.submit"):
        assert spans[name]["parent_id"] == root["span_id"]
        assert root["start_unix_ns"] <= spans[name]["start_unix_ns"] <= spans[name]["end_unix_ns"]


async def test_a_process_whose_dependencies_never_come_up_says_so_and_ends(tmp_path: Path) -> None:
    environment = {
        "SLUICE_POSTGRES_DSN": f"postgresql://nobody@127.0.0.1:{free_port()}/none",
        "SLUICE_REDIS_URL": f"redis://127.0.0.1:{free_port()}/0",
        "SLUICE_GATEWAY_LISTEN": f"127.0.0.1:{free_port()}",
        "SLUICE_SCHEDULERS": "127.0.0.1:1",
        "SLUICE_INTERNAL_TOKEN": "token",
        "SLUICE_MODELS_DIR": str(tmp_path),
        "SLUICE_START_TIMEOUT_S": "1",
    }
    async with gateway_process(environment) as process:
        async with asyncio.timeout(60):
            _, errors = await process.communicate()
        assert process.returncode == 1
    events = [json.loads(line)["event"] for line in errors.decode().splitlines() if line.startswith("{")]
    assert "gateway_start_failed" in events
