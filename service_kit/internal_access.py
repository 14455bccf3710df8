"""How Sluice's own services know each other: by a shared token, by mutual TLS, or by both."""

import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field

from service_kit.environment import Environment, EnvironmentVariableError
from service_kit.errors import UnauthenticatedError
from service_kit.grpc_client import INTERNAL_TOKEN_KEY
from service_kit.tls import ClientTls, MutualTls, ServerTls

_PREFIX = "SLUICE_INTERNAL_TLS"


@dataclass(frozen=True, slots=True, kw_only=True)
class InternalAccess:
    """What a service shows to the others, and asks of them. Without anything every port is open: for tests alone."""

    token: str | None = field(default=None, repr=False)
    tls: MutualTls | None = None

    @classmethod
    def from_environment(cls, environment: Environment) -> "InternalAccess":
        """Raises EnvironmentVariableError, also when there is neither token nor TLS."""
        access = cls(token=environment.optional_text("SLUICE_INTERNAL_TOKEN"), tls=read_mutual_tls(environment))
        if access.token is None and access.tls is None:
            raise EnvironmentVariableError(
                "SLUICE_INTERNAL_TOKEN",
                f"must be set, or {_PREFIX}_CERT with {_PREFIX}_KEY and {_PREFIX}_CA: internal ports are never open",
            )
        return access

    @property
    def server_tls(self) -> ServerTls | None:
        return self.tls.server if self.tls is not None else None

    @property
    def client_tls(self) -> ClientTls | None:
        return self.tls.client if self.tls is not None else None

    def authorize(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Raises UnauthenticatedError. Who has come through mutual TLS has shown a certificate before."""
        if self.token is None:
            return
        given = dict(metadata).get(INTERNAL_TOKEN_KEY, "")
        shown = given if isinstance(given, bytes) else given.encode()
        if not hmac.compare_digest(shown, self.token.encode()):
            raise UnauthenticatedError("an internal call without the internal token")


def read_mutual_tls(environment: Environment) -> MutualTls | None:
    """None when no file is named. Raises EnvironmentVariableError."""
    names = tuple(f"{_PREFIX}_{part}" for part in ("CERT", "KEY", "CA"))
    certificate, key, ca = (environment.optional_path(name) for name in names)
    if certificate is None and key is None and ca is None:
        return None
    if certificate is None or key is None or ca is None:
        missing = names[(certificate, key, ca).index(None)]
        raise EnvironmentVariableError(missing, f"must be set: {', '.join(names)} belong together")
    tls = MutualTls(
        certificate=certificate, key=key, ca=ca, server_name=environment.optional_text(f"{_PREFIX}_SERVER_NAME")
    )
    try:
        tls.server.check()
    except OSError as error:
        raise EnvironmentVariableError(names[0], f"with {names[1]} and {names[2]}: {error}") from error
    return tls
