from pathlib import Path

from sluice.local.services import Service, ServiceContext, ServiceInstance, plan_instances, service_spec

CONTEXT = ServiceContext(
    postgres_dsn="postgresql://db",
    redis_urls={Service.SCHEDULER: "redis://scheduler:a@cache", Service.GATEWAY: "redis://gateway:b@cache"},
    models_directory=Path("/models"),
    engine="native",
    trace_directory=Path("/traces"),
    log_directory=Path("/logs"),
    internal_token="token-1",
    base_environment={
        "PATH": "/bin",
        "SLUICE_ENGINE": "from the shell",
        "SLUICE_SHARE_PREFIXES_BETWEEN_TENANTS": "true",
    },
    overrides={"SLUICE_LOG_LEVEL": "DEBUG"},
)
INSTANCES = [
    ServiceInstance(name="scheduler", service=Service.SCHEDULER, address="127.0.0.1:1"),
    ServiceInstance(name="scheduler-2", service=Service.SCHEDULER, address="127.0.0.1:2"),
    ServiceInstance(name="gpu_worker", service=Service.GPU_WORKER, model="tiny", address="127.0.0.1:3"),
    ServiceInstance(name="gateway", service=Service.GATEWAY, address="127.0.0.1:4"),
]


def test_schedulers_start_first_and_replicas_are_numbered_from_the_second() -> None:
    planned = plan_instances({Service.SCHEDULER: 2, Service.GATEWAY: 1, Service.GPU_WORKER: 2}, ["a"])
    assert [each.name for each in planned] == ["scheduler", "scheduler-2", "gpu_worker", "gpu_worker-2", "gateway"]


def test_workers_are_counted_per_model() -> None:
    planned = plan_instances({Service.GPU_WORKER: 2}, ["a", "b"])
    workers = [(each.name, each.model) for each in planned if each.service is Service.GPU_WORKER]
    assert workers == [("gpu_worker", "a"), ("gpu_worker-2", "a"), ("gpu_worker-3", "b"), ("gpu_worker-4", "b")]
    assert {each.model for each in planned if each.service is not Service.GPU_WORKER} == {""}


def test_a_worker_gets_all_schedulers_and_its_model_but_no_store() -> None:
    environment = service_spec(INSTANCES[2], INSTANCES, CONTEXT).environment
    assert environment is not None
    assert environment["SLUICE_SCHEDULERS"] == "127.0.0.1:1,127.0.0.1:2"
    assert environment["SLUICE_WORKER_LISTEN"] == environment["SLUICE_WORKER_ADVERTISE"] == "127.0.0.1:3"
    assert environment["SLUICE_MODEL_DIR"] == "/models/tiny"
    assert environment["SLUICE_ENGINE"] == "native"
    assert "SLUICE_POSTGRES_DSN" not in environment
    assert "SLUICE_REDIS_URL" not in environment


def test_gateway_and_scheduler_get_the_stores_and_every_service_the_overrides() -> None:
    gateway = service_spec(INSTANCES[3], INSTANCES, CONTEXT)
    scheduler = service_spec(INSTANCES[1], INSTANCES, CONTEXT)
    assert gateway.environment is not None
    assert scheduler.environment is not None
    assert gateway.environment["SLUICE_MODELS_DIR"] == "/models"
    assert scheduler.environment["SLUICE_SCHEDULER_LISTEN"] == "127.0.0.1:2"
    assert scheduler.environment["SLUICE_SHARE_PREFIXES_BETWEEN_TENANTS"] == "true"
    assert gateway.environment["SLUICE_REDIS_URL"] == "redis://gateway:b@cache"
    assert scheduler.environment["SLUICE_REDIS_URL"] == "redis://scheduler:a@cache"
    for spec in (gateway, scheduler):
        assert spec.environment["SLUICE_POSTGRES_DSN"] == "postgresql://db"
        assert spec.environment["SLUICE_LOG_LEVEL"] == "DEBUG"
        assert spec.environment["PATH"] == "/bin"
    assert gateway.command[1:] == ("-m", "gateway")
    assert gateway.log_path == Path("/logs/gateway.log")
