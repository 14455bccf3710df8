"""Asks a service for its health over gRPC, as a load balancer would."""

from enum import StrEnum

from service_kit.health_probe import ask_health
from service_kit.tls import ClientTls


class Health(StrEnum):
    """What a service says of itself."""

    SERVING = "SERVING"
    NOT_SERVING = "NOT_SERVING"
    UNREACHABLE = "UNREACHABLE"


def check_health(address: str, *, tls: ClientTls | None = None, timeout_s: float = 1.0) -> Health:
    """Health of the whole process at `address` (host:port). Never raises for a service that is away."""
    is_serving = ask_health(address, tls=tls, timeout_s=timeout_s)
    if is_serving is None:
        return Health.UNREACHABLE
    return Health.SERVING if is_serving else Health.NOT_SERVING
