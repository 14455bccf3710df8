"""Composition root of the scheduler: reads the environment, builds the adapters, owns the process's life."""

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial

from state_store.postgres.store import PostgresStore

from inference.internal.v1 import scheduler_pb2_grpc
from scheduler.admission import Admission
from scheduler.assignments import Assignments
from scheduler.cancellation import Cancellation
from scheduler.config import SchedulerConfig
from scheduler.coordinator import Coordinator
from scheduler.dispatcher import Dispatcher
from scheduler.loops import every
from scheduler.queue.port import AdmissionQueue
from scheduler.queue.redis_queue import RedisAdmissionQueue
from scheduler.reaper import Reaper, Store
from scheduler.recovery import Recovery
from scheduler.service import SchedulerServicer
from scheduler.session_registry import SessionRegistry
from scheduler.worker_session import Surroundings, WorkerSession
from service_kit.crash_point import CrashPoints
from service_kit.environment import Environment
from service_kit.grpc_server import GrpcServer
from service_kit.ids import SchedulerId
from service_kit.internal_auth import InternalAuth
from service_kit.logging import configure_logging, get_logger
from service_kit.telemetry import setup_tracing
from state_store.delta_log.connection import connect_redis
from state_store.delta_log.port import DeltaLogWriter
from state_store.delta_log.redis_log import RedisDeltaLog
from state_store.model import NewSession
from state_store.ports import PermissiveQuota
from state_store.postgres.migrate import wait_for_schema

_log = get_logger()

STARTUP_PATIENCE = timedelta(minutes=2)
RENEW_S = 1.0
COMPARE_S = 1.0
REAP_S = 1.0


def _now() -> datetime:
    return datetime.now(tz=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The scheduler's objects, wired."""

    servicer: SchedulerServicer
    dispatcher: Dispatcher
    registry: SessionRegistry
    reaper: Reaper
    admission: Admission


def build(config: SchedulerConfig, *, store: Store, log: DeltaLogWriter, queue: AdmissionQueue) -> Parts:
    """Wires the scheduler over its stores."""
    scheduler_id = SchedulerId(config.scheduler_id or f"scheduler-{secrets.token_hex(4)}")
    crash_points = CrashPoints(config.crash_file)
    quota = PermissiveQuota()
    coordinator = Coordinator(store=store, log=log, quota=quota, crash_points=crash_points)
    assignments = Assignments(store=store, log=log)
    recovery = Recovery(store=store, log=log, queue=queue, coordinator=coordinator, crash_points=crash_points)
    wake: list[Callable[[], None]] = []

    def on_room() -> None:
        for call in wake:
            call()

    surroundings = Surroundings(
        store=store,
        coordinator=coordinator,
        assignments=assignments,
        clock=time.monotonic,
        internal_token=config.internal_token,
        on_room=on_room,
    )

    def make_session(session: NewSession, owner_epoch: int) -> WorkerSession:
        return WorkerSession(session, owner_epoch=owner_epoch, surroundings=surroundings)

    registry = SessionRegistry(
        store=store, recovery=recovery, make_session=make_session, clock=time.monotonic, lease=config.lease
    )
    dispatcher = Dispatcher(
        store=store, queue=queue, assignments=assignments, registry=registry, crash_points=crash_points, now=_now
    )
    wake.append(dispatcher.wake)
    admission = Admission(
        store=store,
        queue=queue,
        quota=quota,
        crash_points=crash_points,
        on_queued=dispatcher.wake,
        clock=time.monotonic,
    )
    cancellation = Cancellation(store=store, registry=registry, recovery=recovery)
    reaper = Reaper(
        store=store,
        log=log,
        queue=queue,
        registry=registry,
        recovery=recovery,
        cancellation=cancellation,
        lease=config.lease,
        clock=time.monotonic,
        now=_now,
    )
    servicer = SchedulerServicer(
        scheduler_id=scheduler_id,
        admission=admission,
        cancellation=cancellation,
        registry=registry,
        auth=InternalAuth(config.internal_token),
    )
    return Parts(servicer=servicer, dispatcher=dispatcher, registry=registry, reaper=reaper, admission=admission)


async def serve(config: SchedulerConfig) -> None:
    """Runs until SIGTERM or SIGINT, then drains."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await asyncio.to_thread(wait_for_schema, config.postgres_dsn, STARTUP_PATIENCE)
    store = PostgresStore(config.postgres_dsn)
    await store.open()
    redis = await connect_redis(config.redis_url)
    queue = RedisAdmissionQueue(redis)
    parts = build(config, store=store, log=RedisDeltaLog(redis), queue=queue)
    register = partial(scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, parts.servicer)
    server = GrpcServer(listen=config.listen, services={"inference.internal.v1.SchedulerService": register})
    try:
        async with asyncio.TaskGroup() as tasks:
            loops = [
                tasks.create_task(parts.dispatcher.run()),
                tasks.create_task(every(RENEW_S, parts.registry.renew_once, name="renew")),
                tasks.create_task(every(COMPARE_S, parts.registry.compare_once, name="compare")),
                tasks.create_task(every(REAP_S, parts.reaper.run_once, name="reaper")),
            ]
            port = await server.start()
            await server.set_serving(is_serving=True)
            _log.info("scheduler_started", port=port, pid=os.getpid())
            await stop.wait()
            _log.info("scheduler_stopping")
            parts.admission.is_draining = True
            parts.dispatcher.is_draining = True
            await server.stop(config.drain)
            for task in loops:
                task.cancel()
        await parts.registry.stop()
    finally:
        await store.close()
        await redis.aclose()


def main() -> None:
    config = SchedulerConfig.from_environment(Environment(os.environ))
    configure_logging(service="scheduler", level=config.log_level, log_format=config.log_format)
    tracing = setup_tracing(service_name="scheduler", trace_dir=config.trace_dir, otlp_endpoint=config.otlp_endpoint)
    try:
        asyncio.run(serve(config))
    finally:
        tracing.shutdown()


if __name__ == "__main__":
    main()
