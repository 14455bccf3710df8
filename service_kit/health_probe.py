"""Asks a service on this machine whether it serves: `python -m service_kit.health_probe [--internal] HOST:PORT`.

Exit 0 when it says SERVING; for container health checks. It reads the service's own variables: with SLUICE_TLS_CERT the
public port speaks TLS, with SLUICE_INTERNAL_TLS_CERT the internal ones (`--internal`) do.
"""

import os
import socket
import ssl
import sys
from dataclasses import replace
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service_kit.environment import Environment
from service_kit.internal_access import read_mutual_tls
from service_kit.tls import ClientTls, ServerTls

TIMEOUT_S = 3.0
_SERVING = health_pb2.HealthCheckResponse.SERVING


def probe_tls(environment: Environment, *, is_internal: bool) -> ClientTls | None:
    """How to talk to a service with these variables; None: plainly. A public port's certificate is trusted itself: what
    signed it is not known here. Raises EnvironmentVariableError."""
    if is_internal:
        mutual = read_mutual_tls(environment)
        return mutual.client if mutual is not None else None
    public = ServerTls.from_environment(environment)
    return ClientTls(ca=public.certificate) if public is not None else None


def ask_health(address: str, *, tls: ClientTls | None = None, timeout_s: float = TIMEOUT_S) -> bool | None:
    """Whether the process at `address` (host:port) says that it serves; None when it says nothing."""
    options = (("grpc.use_local_subchannel_pool", 1),)
    try:
        if tls is None:
            channel = grpc.insecure_channel(address, options=options)
        else:
            named = named_tls(address, tls, timeout_s=timeout_s)
            channel = grpc.secure_channel(address, named.credentials(), options=(*options, *named.options()))
    except OSError:
        return None
    with channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return None
    return bool(answer.status == _SERVING)


def named_tls(address: str, tls: ClientTls, *, timeout_s: float = TIMEOUT_S) -> ClientTls:
    """`tls` with a name that the server's certificate has: what is dialled on one's own machine need not be one. Only for
    where `tls` trusts that certificate alone, or nobody else's on this machine. Raises OSError."""
    return tls if tls.server_name else replace(tls, server_name=_find_name(address, tls, timeout_s))


def _find_name(address: str, tls: ClientTls, timeout_s: float) -> str | None:
    """Raises OSError (SSLError is one), also for a certificate that `tls` does not trust."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.set_alpn_protocols(["h2"])
    context.load_verify_locations(tls.ca)
    if tls.certificate is not None:
        context.load_cert_chain(tls.certificate, tls.key)
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s) as plain,
        context.wrap_socket(plain) as secure,
    ):
        certificate = secure.getpeercert() or {}
    names = _names_of(cast("Any", certificate))
    return names[0].replace("*", "probe") if names else None


def _names_of(certificate: dict[str, Any]) -> list[str]:
    alternatives = [value for kind, value in certificate.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]
    subject = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return [*alternatives, *subject]


def main(arguments: list[str]) -> int:
    *flags, address = arguments
    tls = probe_tls(Environment(os.environ), is_internal="--internal" in flags)
    return 0 if ask_health(address, tls=tls) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
