"""Asks a service for its health over gRPC, as a load balancer would."""

from enum import StrEnum

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


class Health(StrEnum):
    """What a service says of itself."""

    SERVING = "SERVING"
    NOT_SERVING = "NOT_SERVING"
    UNREACHABLE = "UNREACHABLE"


def check_health(address: str, *, timeout_s: float = 1.0) -> Health:
    """Health of the whole process at `address` (host:port). Never raises for a service that is away."""
    with grpc.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return Health.UNREACHABLE
    is_serving = answer.status == health_pb2.HealthCheckResponse.ServingStatus.SERVING
    return Health.SERVING if is_serving else Health.NOT_SERVING
