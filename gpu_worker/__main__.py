"""Composition root of the worker's service process: reads the environment, wires the parts, owns the process's life."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

from opentelemetry.metrics import get_meter

from gpu_worker.announcer import Announcer, AnnounceTimes, SchedulerTarget
from gpu_worker.config import WorkerConfig
from gpu_worker.metrics import WorkerMetrics
from gpu_worker.service import WorkerServicer
from gpu_worker.session_stream import StreamTimes
from gpu_worker.supervisor import EngineCommand, EngineLostError, EngineProcess, HangLimits
from gpu_worker.tasks import run_until_first
from gpu_worker.tracing import record_attempt
from gpu_worker.worker import Worker, WorkerTimes, report_readiness
from inference.internal.v1 import scheduler_pb2_grpc, worker_pb2_grpc
from service_kit.environment import Environment, EnvironmentVariableError
from service_kit.garbage import forget_startup_objects
from service_kit.gguf.files import is_gguf
from service_kit.grpc_client import open_channel
from service_kit.grpc_server import GrpcServer, ServerLimits
from service_kit.logging import configure_logging, get_logger
from service_kit.metrics import setup_metrics
from service_kit.model_manifest import MANIFEST_NAME, ModelFilesError, read_manifest
from service_kit.telemetry import setup_tracing

_SERVICE_NAME = "inference.internal.v1.WorkerService"
_MAX_REQUEST_BYTES = 64 << 20
_READINESS_INTERVAL = timedelta(milliseconds=200)
_MODEL_INTERVAL = timedelta(milliseconds=500)
_STREAM_END_GRACE = timedelta(seconds=1)

_log = get_logger()


async def serve(config: WorkerConfig) -> None:
    """Runs until SIGTERM or SIGINT, then drains. Raises EngineLostError when the engine cannot start at all, and
    ModelFilesError when there is no model in time."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await _wait_for_model(config.model_directory, config.start, stop)
    if stop.is_set():
        return
    precision = read_manifest(config.model_directory).precision
    config.check_engine(precision)
    command = EngineCommand(
        model_directory=config.model_directory, settings=config.settings_for(precision), environment=_thread_waiting()
    )
    async with _open_schedulers(config) as schedulers:
        announcer = Announcer(
            schedulers=schedulers, address=config.advertise, worker_id=config.worker_id, times=AnnounceTimes()
        )
        worker = Worker(
            spawn=partial(EngineProcess.spawn, command, clock=time.monotonic),
            announce=announcer.run,
            times=WorkerTimes(
                start=config.start,
                drain=config.drain,
                hang=HangLimits(minimum=config.hang),
                stream=StreamTimes(pace=config.pace),
            ),
            clock=time.monotonic,
            on_finish=record_attempt,
            on_load=WorkerMetrics(get_meter("sluice")).take,
        )
        servicer = WorkerServicer(current_session=lambda: worker.session)
        register = partial(worker_pb2_grpc.add_WorkerServiceServicer_to_server, servicer)
        limits = ServerLimits(max_request_bytes=_MAX_REQUEST_BYTES)
        server = GrpcServer(
            listen=config.listen,
            services={_SERVICE_NAME: register},
            limits=limits,
            authorize=config.access.authorize,
            tls=config.access.server_tls,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, worker.drain)
        try:
            forget_startup_objects()
            port = await server.start()
            _log.info("worker_started", port=port, pid=os.getpid(), worker_id=config.worker_id)
            readiness = report_readiness(
                worker, lambda is_ready: server.set_serving(is_serving=is_ready), interval=_READINESS_INTERVAL
            )
            await run_until_first(worker.run(), readiness)
        finally:
            await server.stop(_STREAM_END_GRACE)
    _log.info("worker_stopped")


async def _wait_for_model(model: Path, patience: timedelta, stop: asyncio.Event) -> None:
    """Returns once the GGUF file is there or the directory has its manifest, the patience is over, or `stop` is set."""
    awaited = model if is_gguf(model) else model / MANIFEST_NAME
    if not awaited.exists():
        _log.info("worker_waits", for_file=str(awaited))
    deadline = time.monotonic() + patience.total_seconds()
    while not awaited.exists() and not stop.is_set() and time.monotonic() < deadline:
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _MODEL_INTERVAL.total_seconds())


@asynccontextmanager
async def _open_schedulers(config: WorkerConfig) -> AsyncIterator[list[SchedulerTarget]]:
    """The configured replicas, each with its channel."""
    access = config.access
    channels = [
        open_channel(address, internal_token=access.token, tls=access.client_tls) for address in config.schedulers
    ]
    try:
        yield [
            SchedulerTarget(address=address, announce=scheduler_pb2_grpc.SchedulerServiceStub(channel).AnnounceWorker)
            for address, channel in zip(config.schedulers, channels, strict=True)
        ]
    finally:
        for channel in channels:
            await channel.close(None)


def _thread_waiting() -> dict[str, str]:
    """How long the engine's threads spin before they sleep, unless the operator has said it.

    They never have all cores to themselves. Measured on 2 cores, 32 sequences: with ten times as many spins the engine alone
    is as fast, and through gRPC, with all services on the same cores, 7 % slower.
    """
    is_said = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys()
    return {} if is_said else {"GOMP_SPINCOUNT": "1000"}


def main() -> int:
    """Exit code 2 for a configuration that cannot work, 1 when there is no model or the engine cannot start; the log says why."""
    try:
        config = WorkerConfig.from_environment(Environment(os.environ))
    except EnvironmentVariableError as error:
        sys.stderr.write(f"gpu_worker: {error}\n")
        return 2
    configure_logging(service="gpu_worker", level=config.log_level, log_format=config.log_format)
    tracing = setup_tracing(service_name="gpu_worker", trace_dir=config.trace_dir, otlp_endpoint=config.otlp_endpoint)
    metrics = setup_metrics(service_name="gpu_worker", otlp_endpoint=config.otlp_endpoint)
    try:
        asyncio.run(serve(config))
    except (EngineLostError, ModelFilesError) as error:
        _log.error("worker_cannot_start", reason=str(error))
        return 1
    finally:
        metrics.shutdown()
        tracing.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
