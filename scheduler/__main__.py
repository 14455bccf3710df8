"""Composition root of the scheduler: reads the environment, builds the adapters, owns the process's life."""

import asyncio
import os
import signal
import sys
import time
from datetime import UTC, datetime, timedelta
from functools import partial

from redis.asyncio import Redis

from inference.internal.v1 import scheduler_pb2_grpc
from scheduler.config import SchedulerConfig
from scheduler.loops import every
from scheduler.output_charges import FLUSH_S
from scheduler.queue.news import RedisQueueNews
from scheduler.queue.redis_queue import RedisAdmissionQueue
from scheduler.redis_cancel_hints import RedisCancelHints
from scheduler.retention import Retention, RetentionSettings
from scheduler.wiring import build
from service_kit.environment import Environment, EnvironmentVariableError
from service_kit.garbage import forget_startup_objects
from service_kit.grpc_server import GrpcServer
from service_kit.logging import configure_logging, get_logger
from service_kit.metrics import setup_metrics
from service_kit.telemetry import setup_tracing
from state_store.delta_log.connection import connect_redis
from state_store.delta_log.redis_log import RedisDeltaLog
from state_store.delta_log.settings import LogSettings
from state_store.errors import StoreUnavailableError
from state_store.postgres.migrate import wait_for_schema
from state_store.postgres.partitions import drop_partitions, ensure_partitions
from state_store.postgres.store import PostgresStore
from state_store.quota.redis_quota import RedisQuota
from state_store.redis_checks import UnsafeRedisError, wait_for_safe_redis

_log = get_logger()

STARTUP_PATIENCE = timedelta(minutes=2)
SCHEMA_POLL = timedelta(seconds=2)
RENEW_S = 1.0
COMPARE_S = 1.0
REAP_S = 1.0
QUOTA_S = 1.0
HINTS_S = 1.0
RETENTION_S = 5.0
PARTITION_S = 60.0


async def serve(config: SchedulerConfig) -> None:
    """Runs until SIGTERM or SIGINT, then drains."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if not await _wait_for_schema(config.postgres_dsn, stop):
        return
    redis = connect_redis(config.redis_url)
    if not await _wait_for_redis(redis, config, stop):
        await redis.aclose()
        return
    store = PostgresStore(config.postgres_dsn)
    await store.open()
    log = RedisDeltaLog(redis, settings=LogSettings(terminal_retention=config.log_kept))
    queue = RedisAdmissionQueue(redis, config.queue)
    quota = RedisQuota(redis)
    parts = build(
        config,
        store=store,
        log=log,
        queue=queue,
        hints=RedisCancelHints(redis),
        quota=quota,
        upkeep=quota,
        quota_records=store,
        pulse=store.pulse,
    )
    assert parts.quota_reaper is not None
    retention = Retention(
        store=store,
        log=log,
        close_logs=parts.coordinator.close_logs,
        now=_now,
        settings=RetentionSettings(log_kept=config.log_kept),
    )
    queue_news = RedisQueueNews(redis)

    async def follow_queue() -> None:
        await parts.dispatcher.follow(queue_news.follow())

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
                tasks.create_task(every(HINTS_S, follow_queue, name="queue_news")),
                tasks.create_task(every(FLUSH_S, parts.charges.flush_once, name="output_charges")),
                tasks.create_task(every(RENEW_S, parts.registry.renew_once, name="renew")),
                tasks.create_task(every(COMPARE_S, parts.registry.compare_once, name="compare")),
                tasks.create_task(every(REAP_S, parts.reaper.run_once, name="reaper")),
                tasks.create_task(every(QUOTA_S, parts.quota_reaper.run_once, name="quota")),
                tasks.create_task(every(RETENTION_S, retention.run_once, name="retention")),
                tasks.create_task(every(PARTITION_S, partial(_keep_partitions, config), name="partitions")),
            ]
            port = await server.start()
            forget_startup_objects()
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


async def _wait_for_redis(redis: Redis, config: SchedulerConfig, stop: asyncio.Event) -> bool:
    """False when the process was told to stop first. Raises UnsafeRedisError, and TimeoutError when patience ends."""
    stopping = asyncio.create_task(stop.wait())
    checking = asyncio.create_task(wait_for_safe_redis(redis, allow_unsafe=config.allows_unsafe_redis))
    try:
        async with asyncio.timeout(STARTUP_PATIENCE.total_seconds()):
            await asyncio.wait((stopping, checking), return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            await checking
        return not stop.is_set()
    finally:
        stopping.cancel()
        checking.cancel()
        await asyncio.gather(stopping, checking, return_exceptions=True)


async def _keep_partitions(config: SchedulerConfig) -> None:
    """Creates those of the coming days and drops those whose time is over. What did not get its locks is tried again in the
    next round; what no partition was made for lies in the default one."""
    now = _now()
    created = await asyncio.to_thread(ensure_partitions, config.postgres_dsn, now, max_tries=1)
    if created:
        _log.info("partitions_created", count=len(created))
    if config.retention is None:
        return
    report = await asyncio.to_thread(drop_partitions, config.postgres_dsn, now, kept=config.retention)
    if report.dropped or report.locked or report.deleted_strays:
        _log.info(
            "partitions_dropped",
            dropped=report.dropped,
            in_use=report.in_use,
            locked=report.locked,
            deleted_strays=report.deleted_strays,
            slowest_s=round(report.slowest_drop.total_seconds(), 3),
        )


def _now() -> datetime:
    return datetime.now(tz=UTC)


def main() -> int:
    """Exit code 2 for a configuration that cannot work."""
    try:
        config = SchedulerConfig.from_environment(Environment(os.environ))
    except EnvironmentVariableError as error:
        sys.stderr.write(f"scheduler: {error}\n")
        return 2
    configure_logging(service="scheduler", level=config.log_level, log_format=config.log_format)
    tracing = setup_tracing(service_name="scheduler", trace_dir=config.trace_dir, otlp_endpoint=config.otlp_endpoint)
    metrics = setup_metrics(service_name="scheduler", otlp_endpoint=config.otlp_endpoint)
    try:
        asyncio.run(serve(config))
    except UnsafeRedisError as error:
        sys.stderr.write(f"scheduler: {error}\n")
        return 2
    finally:
        metrics.shutdown()
        tracing.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
