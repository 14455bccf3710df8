"""Transport security: PEM files to gRPC credentials. A server reads its files again when they have changed."""

import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc

from service_kit.environment import Environment, EnvironmentVariableError
from service_kit.logging import get_logger

Stamp = tuple[tuple[int, int, int], ...]

_log = get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """What a server shows: its certificate (with intermediate ones behind it) and key. With `client_ca` it lets in only
    clients whose certificate is signed by it."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @classmethod
    def from_environment(cls, environment: Environment) -> "ServerTls | None":
        """TLS of a public port: SLUICE_TLS_CERT and SLUICE_TLS_KEY, none or both. Raises EnvironmentVariableError."""
        certificate = environment.optional_path("SLUICE_TLS_CERT")
        key = environment.optional_path("SLUICE_TLS_KEY")
        if certificate is None and key is None:
            return None
        if certificate is None or key is None:
            missing = "SLUICE_TLS_CERT" if certificate is None else "SLUICE_TLS_KEY"
            raise EnvironmentVariableError(missing, "must be set: certificate and key belong together")
        tls = cls(certificate=certificate, key=key)
        try:
            tls.check()
        except OSError as error:
            raise EnvironmentVariableError("SLUICE_TLS_CERT", f"with SLUICE_TLS_KEY: {error}") from error
        return tls

    def check(self) -> None:
        """Raises OSError (SSLError is one) for files that are not there, are no PEM or do not belong together."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key, password=b"")
        if self.client_ca is not None:
            context.load_verify_locations(self.client_ca)

    def credentials(self) -> grpc.ServerCredentials:
        """Raises OSError. Changed files count from the next connection on; broken ones never."""
        reader = _Reader(self)
        return grpc.dynamic_ssl_server_credentials(
            reader.read(),
            cast("Any", reader.read_changed),  # the stubs do not know that None means "as before"
            require_client_authentication=self.client_ca is not None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """What a client trusts, and shows if it has to. `ca` None: what the system trusts. `server_name`: the name that the
    server's certificate must have, when it is not the one that was dialled."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises OSError."""
        return grpc.ssl_channel_credentials(
            root_certificates=self.ca.read_bytes() if self.ca is not None else None,
            private_key=self.key.read_bytes() if self.key is not None else None,
            certificate_chain=self.certificate.read_bytes() if self.certificate is not None else None,
        )

    def options(self) -> tuple[tuple[str, str], ...]:
        """Of a channel."""
        return (("grpc.ssl_target_name_override", self.server_name),) if self.server_name else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MutualTls:
    """Certificate and key of a service, and the authority that all services trust in both directions."""

    certificate: Path
    key: Path
    ca: Path
    server_name: str | None = None
    """The one name of all services' certificates; None: each has the name it is dialled by."""

    @property
    def server(self) -> ServerTls:
        return ServerTls(certificate=self.certificate, key=self.key, client_ca=self.ca)

    @property
    def client(self) -> ClientTls:
        return ClientTls(ca=self.ca, certificate=self.certificate, key=self.key, server_name=self.server_name)


class _Reader:
    """Reads a server's files; gRPC asks before each handshake, from threads of its own."""

    def __init__(self, tls: ServerTls) -> None:
        self._tls = tls
        self._stamp: Stamp = ()
        self._refused: Stamp = ()
        self._lock = threading.Lock()

    def read(self) -> grpc.ServerCertificateConfiguration:
        """Raises OSError."""
        tls, self._stamp = self._tls, self._look()
        tls.check()
        return grpc.ssl_server_certificate_configuration(
            [(tls.key.read_bytes(), tls.certificate.read_bytes())],
            root_certificates=tls.client_ca.read_bytes() if tls.client_ca is not None else None,
        )

    def read_changed(self) -> grpc.ServerCertificateConfiguration | None:
        """None when nothing changed, or the new files are no good (as between the writing of the two)."""
        with self._lock:
            before = self._stamp
            try:
                if self._look() == before:
                    return None
                changed = self.read()
            except OSError as error:
                refused, self._stamp = self._stamp, before
                if refused != self._refused:
                    _log.warning("certificate_not_reloaded", path=str(self._tls.certificate), error=str(error))
                self._refused = refused
                return None
            _log.info("certificate_reloaded", path=str(self._tls.certificate))
            return changed

    def _look(self) -> Stamp:
        paths = (self._tls.certificate, self._tls.key, self._tls.client_ca)
        found = [path.stat() for path in paths if path is not None]
        return tuple((each.st_mtime_ns, each.st_size, each.st_ino) for each in found)
