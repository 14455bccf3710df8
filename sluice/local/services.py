"""Which service processes a local stack has, and the environment each of them gets. Pure but for looking where a model lies."""

import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from service_kit.model_manifest import find_model
from sluice.local.child import ChildSpec


class Service(StrEnum):
    """The services; the value is the Python package that `python -m` runs."""

    SCHEDULER = "scheduler"
    GPU_WORKER = "gpu_worker"
    GATEWAY = "gateway"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedInstance:
    """One process to be; `name` is unique in the stack ("gpu_worker", "gpu_worker-2", …)."""

    name: str
    service: Service
    model: str = ""
    """What a worker serves; empty for the other services."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceInstance(PlannedInstance):
    """One process of a service."""

    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceContext:
    """What all services of one stack share."""

    postgres_dsn: str
    redis_urls: Mapping[Service, str]
    """Of the services that use Redis; each has a user of its own."""
    models_directory: Path
    engine: str
    trace_directory: Path
    log_directory: Path
    internal_token: str
    base_environment: Mapping[str, str] = field(default_factory=dict)
    """The caller's environment, overridden by what the stack decides."""
    overrides: Mapping[str, str] = field(default_factory=dict)
    """Settings that override all others, for every service."""


def plan_instances(counts: Mapping[Service, int], models: Sequence[str]) -> list[PlannedInstance]:
    """In start order: schedulers first, gateways last. `counts` of workers is per model."""
    planned: list[PlannedInstance] = []
    for service in Service:
        of_models = models if service is Service.GPU_WORKER else ("",)
        wanted = [model for model in of_models for _ in range(counts.get(service, 1))]
        for number, model in enumerate(wanted, start=1):
            name = service.value if number == 1 else f"{service.value}-{number}"
            planned.append(PlannedInstance(name=name, service=service, model=model))
    return planned


def service_spec(instance: ServiceInstance, instances: list[ServiceInstance], context: ServiceContext) -> ChildSpec:
    """How to run `instance` beside `instances`."""
    return ChildSpec(
        name=instance.name,
        command=(sys.executable, "-m", instance.service.value),
        log_path=context.log_directory / f"{instance.name}.log",
        environment={
            **context.base_environment,
            "PYTHONUNBUFFERED": "1",
            "SLUICE_LOG_FORMAT": context.base_environment.get("SLUICE_LOG_FORMAT", "console"),
            "SLUICE_DRAIN_S": context.base_environment.get("SLUICE_DRAIN_S", "5"),
            "SLUICE_TRACE_DIR": str(context.trace_directory),
            "SLUICE_INTERNAL_TOKEN": context.internal_token,
            **_own_environment(instance, instances, context),
            **context.overrides,
        },
        stop_signal=signal.SIGTERM,
    )


def _own_environment(
    instance: ServiceInstance, instances: list[ServiceInstance], context: ServiceContext
) -> dict[str, str]:
    schedulers = ",".join(other.address for other in instances if other.service is Service.SCHEDULER)
    stores = {"SLUICE_POSTGRES_DSN": context.postgres_dsn}
    if (redis_url := context.redis_urls.get(instance.service)) is not None:
        stores["SLUICE_REDIS_URL"] = redis_url
    match instance.service:
        case Service.SCHEDULER:
            return {**stores, "SLUICE_SCHEDULER_LISTEN": instance.address}
        case Service.GPU_WORKER:
            return {
                "SLUICE_WORKER_ID": instance.name,
                "SLUICE_WORKER_LISTEN": instance.address,
                "SLUICE_WORKER_ADVERTISE": instance.address,
                "SLUICE_SCHEDULERS": schedulers,
                "SLUICE_MODEL_DIR": str(_model_path(context.models_directory, instance.model)),
                "SLUICE_ENGINE": context.engine,
            }
        case Service.GATEWAY:
            return {
                **stores,
                "SLUICE_GATEWAY_LISTEN": instance.address,
                "SLUICE_SCHEDULERS": schedulers,
                "SLUICE_MODELS_DIR": str(context.models_directory),
            }


def _model_path(models_directory: Path, name: str) -> Path:
    """Of a model that is not there yet, the directory that a worker waits for."""
    return find_model(models_directory, name) or models_directory / name
