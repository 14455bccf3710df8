"""TLS, mutual TLS and the internal token on a real server; who is refused, and that the others are served on."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

from service_kit.environment import Environment, EnvironmentVariableError
from service_kit.gate import Gate
from service_kit.grpc_client import open_channel
from service_kit.grpc_server import GrpcServer
from service_kit.health_probe import ask_health, main, probe_tls
from service_kit.internal_access import InternalAccess, read_mutual_tls
from service_kit.rpc_status import parse_rpc_error
from service_kit.tls import ClientTls, MutualTls, ServerTls
from tests.support.certificates import Authority, Certificate

SERVICE = "test.Echo"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def certificate(authority: Authority) -> Certificate:
    return authority.issue("service", "DNS:localhost", "DNS:sluice.internal")


@pytest.fixture(scope="module")
def mutual(authority: Authority, certificate: Certificate) -> MutualTls:
    return MutualTls(
        certificate=certificate.certificate, key=certificate.key, ca=authority.ca, server_name="sluice.internal"
    )


async def _echo(request: bytes, context: Any) -> bytes:
    return request


def _register(server: grpc.aio.Server) -> None:
    handlers = {"Unary": grpc.unary_unary_rpc_method_handler(_echo)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])


@asynccontextmanager
async def serving(access: InternalAccess | None = None, *, tls: ServerTls | None = None) -> AsyncIterator[str]:
    access = access or InternalAccess()
    server = GrpcServer(
        listen="127.0.0.1:0",
        services={SERVICE: _register},
        authorize=access.authorize,
        tls=tls or access.server_tls,
    )
    port = await server.start()
    await server.set_serving(is_serving=True)
    try:
        yield f"localhost:{port}"
    finally:
        await server.stop(timedelta(0))


async def outcome(
    address: str, *, tls: ClientTls | None = None, token: str | None = None, method: str = f"/{SERVICE}/Unary"
) -> grpc.StatusCode:
    channel = open_channel(address, internal_token=token, tls=tls)
    try:
        await channel.unary_unary(method, None, None)(b"x", timeout=5)
    except grpc.aio.AioRpcError as error:
        return error.code()
    finally:
        await channel.close(None)
    return grpc.StatusCode.OK


OK, UNAVAILABLE = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


async def test_a_tls_port_refuses_plain_clients_and_those_that_trust_somebody_else_and_serves_on(
    authority: Authority, certificate: Certificate, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "stranger")
    async with serving(tls=ServerTls(certificate=certificate.certificate, key=certificate.key)) as address:
        good = ClientTls(ca=authority.ca)
        assert await outcome(address) is UNAVAILABLE
        assert await outcome(address, tls=ClientTls(ca=stranger.ca)) is UNAVAILABLE
        assert await outcome(address, tls=ClientTls(ca=authority.ca, server_name="another.host")) is UNAVAILABLE
        assert await outcome(address, tls=good) is OK


async def test_a_mutual_tls_port_refuses_clients_without_a_certificate_of_the_authority(
    authority: Authority, mutual: MutualTls, tmp_path: Path
) -> None:
    strange = Authority(tmp_path, "stranger").issue("client")
    async with serving(InternalAccess(tls=mutual)) as address:
        assert await outcome(address) is UNAVAILABLE
        assert await outcome(address, tls=ClientTls(ca=authority.ca)) is UNAVAILABLE
        foreign = ClientTls(ca=authority.ca, certificate=strange.certificate, key=strange.key)
        assert await outcome(address, tls=foreign) is UNAVAILABLE
        assert await outcome(address, tls=mutual.client) is OK


async def test_with_token_and_mutual_tls_both_are_asked_for(mutual: MutualTls) -> None:
    async with serving(InternalAccess(token="s3cret", tls=mutual)) as address:
        assert await outcome(address, tls=mutual.client) is UNAUTHENTICATED
        assert await outcome(address, token="s3cret") is UNAVAILABLE
        assert await outcome(address, tls=mutual.client, token="s3cret") is OK


async def test_without_the_token_every_method_is_refused_known_or_not_but_health() -> None:
    async with serving(InternalAccess(token="s3cret")) as address:
        for token in (None, "wrong", "s3cret "):
            assert await outcome(address, token=token) is UNAUTHENTICATED
        assert await outcome(address, method=f"/{SERVICE}/Nothing") is UNAUTHENTICATED
        assert await _reflection(address, None) is UNAUTHENTICATED
        assert await _reflection(address, "s3cret") is OK
        assert await outcome(address, token="s3cret") is OK
        channel = open_channel(address)
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await channel.close(None)


async def _reflection(address: str, token: str | None) -> grpc.StatusCode:
    channel = open_channel(address)
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    metadata = (("x-sluice-internal-token", token),) if token else ()
    call = stub.ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=5, metadata=metadata
    )
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code()
    finally:
        await channel.close(None)
    return OK


async def test_a_refused_call_tells_nothing_and_is_not_read() -> None:
    async with serving(InternalAccess(token="s3cret")) as address:
        channel = open_channel(address)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{SERVICE}/Unary", None, None)(bytes(20 << 20), timeout=5)
        failure = parse_rpc_error(caught.value)
        assert failure.code is UNAUTHENTICATED  # and not RESOURCE_EXHAUSTED: the message is above the server's limit
        assert "s3cret" not in failure.message
        await channel.close(None)


def test_the_gate_counts_every_refusal_and_logs_one_a_minute() -> None:
    seconds = [0.0]
    gate = Gate(InternalAccess(token="s3cret").authorize, clock=lambda: seconds[0])
    call: Any = _Details(f"/{SERVICE}/Unary", ())
    with capture_logs() as logs:
        for second in (0.0, 1.0, 59.0, 60.0):
            seconds[0] = second
            assert gate.find_refusal(call) is not None
    assert gate.num_refused == 4
    assert [(entry["event"], entry["refused"]) for entry in logs] == [("call_refused", 1), ("call_refused", 4)]
    health: Any = _Details("/grpc.health.v1.Health/Watch", ())
    assert gate.find_refusal(health) is None


class _Details:
    def __init__(self, method: str, metadata: tuple[tuple[str, str], ...]) -> None:
        self.method = method
        self.invocation_metadata = metadata


async def test_a_replaced_certificate_counts_from_the_next_connection_on(authority: Authority) -> None:
    old = authority.issue("before", "DNS:localhost", "DNS:before.example")
    new = authority.issue("after", "DNS:localhost", "DNS:after.example")
    half = authority.issue("half", "DNS:localhost")
    by_name = {name: ClientTls(ca=authority.ca, server_name=f"{name}.example") for name in ("before", "after")}
    async with serving(tls=ServerTls(certificate=old.certificate, key=old.key)) as address:
        assert await outcome(address, tls=by_name["before"]) is OK
        old.key.write_bytes(half.key.read_bytes())  # not the key of the certificate: the old pair goes on
        assert await outcome(address, tls=by_name["before"]) is OK
        authority.replace(old, new)
        assert await outcome(address, tls=by_name["after"]) is OK
        assert await outcome(address, tls=by_name["before"]) is UNAVAILABLE


def _variables(tls: MutualTls) -> dict[str, str]:
    return {
        "SLUICE_INTERNAL_TLS_CERT": str(tls.certificate),
        "SLUICE_INTERNAL_TLS_KEY": str(tls.key),
        "SLUICE_INTERNAL_TLS_CA": str(tls.ca),
        "SLUICE_INTERNAL_TLS_SERVER_NAME": "sluice.internal",
    }


def test_internal_access_comes_from_a_token_or_from_three_files_and_never_from_nothing(mutual: MutualTls) -> None:
    assert InternalAccess.from_environment(Environment(_variables(mutual))) == InternalAccess(tls=mutual)
    with_token = {"SLUICE_INTERNAL_TOKEN": "t", "SLUICE_INTERNAL_TLS_CERT": ""}
    assert InternalAccess.from_environment(Environment(with_token)) == InternalAccess(token="t")
    with pytest.raises(EnvironmentVariableError, match=r"SLUICE_INTERNAL_TOKEN.*SLUICE_INTERNAL_TLS_CERT"):
        InternalAccess.from_environment(Environment({}))
    assert "s3cret" not in repr(InternalAccess(token="s3cret"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"SLUICE_INTERNAL_TLS_CA": ""}, "SLUICE_INTERNAL_TLS_CA"),
        ({"SLUICE_INTERNAL_TLS_KEY": "/nowhere.key"}, "SLUICE_INTERNAL_TLS_KEY"),
        ({"SLUICE_INTERNAL_TLS_CA": __file__}, "SLUICE_INTERNAL_TLS_CA"),
    ],
)
def test_incomplete_or_broken_tls_files_are_named(mutual: MutualTls, changes: Mapping[str, str], named: str) -> None:
    with pytest.raises(EnvironmentVariableError, match=named):
        read_mutual_tls(Environment({**_variables(mutual), **changes}))


def test_a_public_certificate_needs_its_key(certificate: Certificate) -> None:
    with pytest.raises(EnvironmentVariableError, match="SLUICE_TLS_KEY"):
        ServerTls.from_environment(Environment({"SLUICE_TLS_CERT": str(certificate.certificate)}))
    other = {"SLUICE_TLS_CERT": str(certificate.certificate), "SLUICE_TLS_KEY": str(certificate.certificate)}
    with pytest.raises(EnvironmentVariableError, match="SLUICE_TLS_CERT"):
        ServerTls.from_environment(Environment(other))
    assert ServerTls.from_environment(Environment({})) is None


async def test_the_probe_reaches_a_tls_port_whatever_its_certificates_names(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    public = authority.issue("public", "DNS:*.example.org")
    variables = {"SLUICE_TLS_CERT": str(public.certificate), "SLUICE_TLS_KEY": str(public.key)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    async with serving(tls=ServerTls(certificate=public.certificate, key=public.key)) as address:
        assert await asyncio.to_thread(ask_health, address) is None
        assert await asyncio.to_thread(main, ["127.0.0.1:" + address.rpartition(":")[2]]) == 0
    assert await asyncio.to_thread(main, [address]) == 1


async def test_the_probe_reaches_a_mutual_tls_port_with_the_services_own_certificate(mutual: MutualTls) -> None:
    variables = _variables(mutual)
    del variables["SLUICE_INTERNAL_TLS_SERVER_NAME"]
    tls = probe_tls(Environment(variables), is_internal=True)
    async with serving(InternalAccess(token="s3cret", tls=mutual)) as address:
        number = address.rpartition(":")[2]
        assert await asyncio.to_thread(ask_health, f"127.0.0.1:{number}", tls=tls) is True
        assert await asyncio.to_thread(ask_health, f"127.0.0.1:{number}") is None
