"""Two models and one without a worker, every port behind TLS: public, and mutual between the services."""

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from inference.v1 import inference_pb2, inference_pb2_grpc
from service_kit.errors import Reason
from service_kit.grpc_client import INTERNAL_TOKEN_KEY, open_channel
from service_kit.tls import ClientTls
from sluice.client_events import Reconnecting, Sampling
from sluice.local.services import Service
from tests.support.certificates import Authority
from tests.support.reader import Reader
from tests.support.stack import RunningStack, running_stack, simulated_output

MODELS = ("first-model", "second-model")
IDLE = "idle-model"
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture(scope="module")
def authority() -> Iterator[Authority]:
    directory = Path(tempfile.mkdtemp(prefix="sluice-authority-"))
    yield Authority(directory)
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def secure_stack(authority: Authority) -> Iterator[RunningStack]:
    public = authority.issue("gateway", "DNS:localhost", "IP:127.0.0.1")
    internal = authority.issue("internal", "DNS:sluice.internal")
    overrides = {
        "SLUICE_TLS_CERT": str(public.certificate),
        "SLUICE_TLS_KEY": str(public.key),
        "SLUICE_INTERNAL_TLS_CERT": str(internal.certificate),
        "SLUICE_INTERNAL_TLS_KEY": str(internal.key),
        "SLUICE_INTERNAL_TLS_CA": str(authority.ca),
        "SLUICE_INTERNAL_TLS_SERVER_NAME": "sluice.internal",
    }
    with running_stack(models=MODELS, idle_models=(IDLE,), overrides=overrides) as stack:
        stack.tls = ClientTls(ca=authority.ca)
        yield stack


async def answer(stack: RunningStack, model: str) -> tuple[int, ...]:
    async with stack.client() as client:
        reader = Reader(client.generate(model, model, sampling=Sampling(max_output_tokens=8, seed=3)))
        await reader.until_end()
    return reader.token_ids


async def test_a_request_for_each_model_is_answered_by_a_worker_of_it(secure_stack: RunningStack) -> None:
    for model in MODELS:
        assert await answer(secure_stack, model) == simulated_output(model, seed=3, count=8)
        query = (
            "SELECT attempts.worker_id FROM attempts JOIN worker_sessions USING (session_id)"
            " JOIN generations USING (generation_id) WHERE generations.model = %s AND worker_sessions.model = %s"
        )
        row = secure_stack.row(query, model, model)
        assert row is not None
        (worker,) = [each for each in secure_stack.local.instances if each.model == model]
        assert row["worker_id"] == worker.name


async def test_a_model_without_a_worker_is_unavailable_and_says_why(secure_stack: RunningStack) -> None:
    async with secure_stack.client() as client:
        assert {model.model for model in await client.list_models()} == {*MODELS, IDLE}
        events = client.generate(IDLE, "hello", sampling=Sampling(max_output_tokens=1))
        first = await anext(events)
        await events.aclose()
    assert isinstance(first, Reconnecting)
    assert first.cause == Reason.NO_WORKER


async def test_strangers_are_refused_at_every_port_and_the_others_are_served_on(
    secure_stack: RunningStack, authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "stranger")
    foreign = stranger.issue("client")
    for instance in secure_stack.local.instances:
        is_public = instance.service is Service.GATEWAY
        callers = [None, ClientTls(ca=stranger.ca)]
        if not is_public:
            by_name = {"ca": authority.ca, "server_name": "sluice.internal"}
            callers += [
                ClientTls(**by_name),
                ClientTls(**by_name, certificate=foreign.certificate, key=foreign.key),
            ]
        for tls in callers:
            assert await _code(instance.address, tls) is UNAVAILABLE, instance.name
        own = secure_stack.local.probe_of(instance.name)
        assert await _code(instance.address, secure_stack.tls if is_public else own) is grpc.StatusCode.UNAUTHENTICATED
    assert await answer(secure_stack, MODELS[0]) == simulated_output(MODELS[0], seed=3, count=8)


async def _code(address: str, tls: ClientTls | None) -> grpc.StatusCode:
    """Of a call without a key, and with a wrong internal token."""
    channel = open_channel(address, tls=tls)
    try:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        metadata = ((INTERNAL_TOKEN_KEY, "wrong"),)
        await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata, timeout=10)
    except grpc.aio.AioRpcError as error:
        return error.code()
    finally:
        await channel.close(None)
    return grpc.StatusCode.OK


async def test_the_commands_of_the_same_home_speak_tls_by_themselves_and_others_with_the_authority(
    secure_stack: RunningStack, authority: Authority, tmp_path: Path
) -> None:
    home = {"SLUICE_HOME": str(secure_stack.home.root)}
    code, output = await _sluice("status", **home)
    assert code == 0, output
    question = ("generate", "hello", "--raw", "--max-tokens", "5", "--model", MODELS[1])
    code, output = await _sluice(*question, **home)
    assert code == 0, output
    elsewhere = {
        "SLUICE_HOME": str(tmp_path),
        "SLUICE_TARGET": secure_stack.local.gateways[0],
        "SLUICE_API_KEY": secure_stack.api_key,
    }
    code, output = await _sluice(*question, "--ca-cert", str(authority.ca), **elsewhere)
    assert code == 0, output
    code, output = await _sluice(*question, "--ca-cert", str(tmp_path / "absent.pem"), **elsewhere)
    assert code != 0
    assert "absent.pem" in output


async def _sluice(*arguments: str, **environment: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sluice", *arguments),
        env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode()
