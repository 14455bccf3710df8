"""Composition root of the gateway: `python -m gateway`."""

import asyncio
import os
import signal
import sys
import uuid
from datetime import timedelta
from functools import partial

from gateway.app import GatewayApp
from gateway.config import GatewayConfig, TokenizationLimits
from service_kit.environment import Environment, EnvironmentVariableError
from service_kit.garbage import forget_startup_objects
from service_kit.ids import GatewayId
from service_kit.internal_access import InternalAccess
from service_kit.logging import LogFormat, configure_logging, get_logger
from service_kit.metrics import setup_metrics
from service_kit.telemetry import setup_tracing
from service_kit.tls import ServerTls
from state_store.delta_log.connection import connect_redis
from state_store.delta_log.redis_log import RedisDeltaLog
from state_store.postgres.pool import PoolSettings
from state_store.postgres.store import PostgresStore
from state_store.quota.redis_quota import RedisQuota
from state_store.redis_checks import UnsafeRedisError, wait_for_safe_redis

_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_MAX_DRAIN = timedelta(hours=1)


def read_config(environment: Environment) -> GatewayConfig:
    """Raises EnvironmentVariableError, which names the variable."""
    defaults = TokenizationLimits()
    return GatewayConfig(
        postgres_dsn=environment.text("SLUICE_POSTGRES_DSN"),
        redis_url=environment.text("SLUICE_REDIS_URL"),
        listen=environment.text("SLUICE_GATEWAY_LISTEN", "127.0.0.1:50051"),
        schedulers=environment.texts("SLUICE_SCHEDULERS"),
        models_dir=environment.path("SLUICE_MODELS_DIR"),
        trace_dir=environment.optional_path("SLUICE_TRACE_DIR"),
        otlp_endpoint=environment.optional_text("OTEL_EXPORTER_OTLP_ENDPOINT"),
        log_level=environment.choice("SLUICE_LOG_LEVEL", "INFO", _LOG_LEVELS),
        log_format=environment.choice("SLUICE_LOG_FORMAT", "json", tuple(LogFormat)),
        access=InternalAccess.from_environment(environment),
        tls=ServerTls.from_environment(environment),
        crash_file=environment.optional_path("SLUICE_CRASH_FILE"),
        drain=environment.seconds("SLUICE_DRAIN_S", timedelta(seconds=20), minimum=timedelta(0), maximum=_MAX_DRAIN),
        start_timeout=environment.seconds(
            "SLUICE_START_TIMEOUT_S", timedelta(seconds=60), minimum=timedelta(seconds=1), maximum=_MAX_DRAIN
        ),
        allows_unsafe_redis=environment.boolean("SLUICE_ALLOW_UNSAFE_REDIS", default=False),
        tokenization=TokenizationLimits(
            num_threads=environment.integer("SLUICE_TOKENIZE_THREADS", defaults.num_threads, minimum=1, maximum=64),
            max_prompt_bytes=environment.integer(
                "SLUICE_MAX_PROMPT_BYTES", defaults.max_prompt_bytes, minimum=1, maximum=10 << 20
            ),
        ),
    )


async def serve(config: GatewayConfig) -> None:
    """Runs until SIGTERM or SIGINT, then drains."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    store = PostgresStore(config.postgres_dsn, settings=PoolSettings(fails_fast=True))
    redis = connect_redis(config.redis_url)
    await store.open()
    try:
        app = GatewayApp(
            config,
            gateway_id=GatewayId(f"gateway-{uuid.uuid4().hex}"),
            generations=store,
            sessions=store,
            keys=store,
            log=RedisDeltaLog(redis),
            quota=RedisQuota(redis),
            check_stores=partial(wait_for_safe_redis, redis, allow_unsafe=config.allows_unsafe_redis),
            pulse=store.pulse,
        )
        forget_startup_objects()
        await app.run(stop)
    finally:
        await redis.aclose()
        await store.close()


def main() -> int:
    """Exit code 2 for a configuration that cannot work, 1 for dependencies that did not come up in time."""
    try:
        config = read_config(Environment(os.environ))
    except EnvironmentVariableError as error:
        sys.stderr.write(f"gateway: {error}\n")
        return 2
    configure_logging(service="gateway", level=config.log_level, log_format=LogFormat(config.log_format))
    tracing = setup_tracing(service_name="gateway", trace_dir=config.trace_dir, otlp_endpoint=config.otlp_endpoint)
    metrics = setup_metrics(service_name="gateway", otlp_endpoint=config.otlp_endpoint)
    try:
        asyncio.run(serve(config))
    except UnsafeRedisError as error:
        sys.stderr.write(f"gateway: {error}\n")
        return 2
    except TimeoutError as error:
        get_logger().error("gateway_start_failed", error=str(error))
        return 1
    finally:
        metrics.shutdown()
        tracing.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
