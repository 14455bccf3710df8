"""Composition root of the scheduler: reads the environment, builds the adapters, owns the process's life."""

import asyncio
import os
import signal
import sys
import time
from datetime import UTC, datetime, timedelta
from functools import partial

from inference.internal.v1 import scheduler_pb2_grpc
from scheduler.config import SchedulerConfig
from scheduler.loops import every
from scheduler.queue.redis_queue import RedisAdmissionQueue
from scheduler.redis_cancel_hints import RedisCancelHints
from scheduler.wiring import build
from service_kit.environment import Environment, EnvironmentVariableError
from service_kit.grpc_server import GrpcServer
from service_kit.logging import configure_logging, get_logger
from service_kit.telemetry import setup_tracing
from state_store.delta_log.connection import connect_redis
from state_store.delta_log.redis_log import RedisDeltaLog
from state_store.errors import StoreUnavailableError
from state_store.postgres.migrate import wait_for_schema
from state_store.postgres.partitions import ensure_partitions
from state_store.postgres.store import PostgresStore

_log = get_logger()

STARTUP_PATIENCE = timedelta(minutes=2)
SCHEMA_POLL = timedelta(seconds=2)
RENEW_S = 1.0
COMPARE_S = 1.0
REAP_S = 1.0
HINTS_S = 1.0
PARTITION_S = 3600.0


async def serve(config: SchedulerConfig) -> None:
    """Runs until SIGTERM or SIGINT, then drains."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if not await _wait_for_schema(config.postgres_dsn, stop):
        return
    store = PostgresStore(config.postgres_dsn)
    await store.open()
    redis = connect_redis(config.redis_url)
    queue = RedisAdmissionQueue(redis)
    parts = build(config, store=store, log=RedisDeltaLog(redis), queue=queue, hints=RedisCancelHints(redis))
    register = partial(scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, parts.servicer)
    server = GrpcServer(
        listen=config.listen,
        services={"inference.internal.v1.SchedulerService": register},
        authorize=config.access.authorize,
        tls=config.access.server_tls,
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            loops = [
                tasks.create_task(parts.dispatcher.run()),
                tasks.create_task(every(HINTS_S, parts.cancellation.follow_hints, name="cancel_hints")),
                tasks.create_task(every(RENEW_S, parts.registry.renew_once, name="renew")),
                tasks.create_task(every(COMPARE_S, parts.registry.compare_once, name="compare")),
                tasks.create_task(every(REAP_S, parts.reaper.run_once, name="reaper")),
                tasks.create_task(
                    every(PARTITION_S, partial(_create_partitions, config.postgres_dsn), name="partitions")
                ),
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


async def _wait_for_schema(dsn: str, stop: asyncio.Event) -> bool:
    """False when the process was told to stop first. Raises StoreUnavailableError when patience ends."""
    give_up_at = time.monotonic() + STARTUP_PATIENCE.total_seconds()
    while not stop.is_set():
        try:
            await asyncio.to_thread(wait_for_schema, dsn, SCHEMA_POLL)
        except StoreUnavailableError as error:
            if time.monotonic() >= give_up_at:
                raise
            _log.info("waiting_for_schema", problem=error.message)
        else:
            return True
    return False


async def _create_partitions(dsn: str) -> None:
    """Those of the coming days; what no partition was made for lies in the default one."""
    created = await asyncio.to_thread(ensure_partitions, dsn, datetime.now(tz=UTC))
    if created:
        _log.info("partitions_created", count=len(created))


def main() -> int:
    """Exit code 2 for a configuration that cannot work."""
    try:
        config = SchedulerConfig.from_environment(Environment(os.environ))
    except EnvironmentVariableError as error:
        sys.stderr.write(f"scheduler: {error}\n")
        return 2
    configure_logging(service="scheduler", level=config.log_level, log_format=config.log_format)
    tracing = setup_tracing(service_name="scheduler", trace_dir=config.trace_dir, otlp_endpoint=config.otlp_endpoint)
    try:
        asyncio.run(serve(config))
    finally:
        tracing.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
