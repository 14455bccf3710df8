"""Settings of the scheduler process."""

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from scheduler.queue.settings import QueueSettings
from service_kit.environment import Environment
from service_kit.internal_access import InternalAccess
from service_kit.logging import LogFormat

_MOST_REQUESTS = 1_000_000
_MOST_PROMPT_TOKENS = 2_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """`crash_file` arms the crash points of tests and stays None in production."""

    listen: str
    scheduler_id: str | None
    postgres_dsn: str
    redis_url: str
    access: InternalAccess
    lease: timedelta
    drain: timedelta
    trace_dir: Path | None
    otlp_endpoint: str | None
    log_level: str
    log_format: LogFormat
    crash_file: Path | None
    log_kept: timedelta = timedelta(minutes=10)
    """How long the delta log outlives the end."""
    retention: timedelta | None = timedelta(days=30)
    """How long rows are kept; None is for ever."""
    allows_unsafe_redis: bool = False
    queue: QueueSettings = field(default_factory=QueueSettings)
    shares_prefixes: bool = False
    """Whether tenants share cached prefixes. They then can tell from the time of a first token what others have asked."""

    @classmethod
    def from_environment(cls, environment: Environment) -> "SchedulerConfig":
        """Raises EnvironmentVariableError, which names the variable."""
        return cls(
            listen=environment.text("SLUICE_SCHEDULER_LISTEN", "127.0.0.1:7201"),
            scheduler_id=environment.optional_text("SLUICE_SCHEDULER_ID"),
            postgres_dsn=environment.text("SLUICE_POSTGRES_DSN"),
            redis_url=environment.text("SLUICE_REDIS_URL"),
            access=InternalAccess.from_environment(environment),
            lease=environment.seconds(
                "SLUICE_LEASE_S", timedelta(seconds=5), minimum=timedelta(seconds=1), maximum=timedelta(minutes=5)
            ),
            drain=environment.seconds(
                "SLUICE_DRAIN_S", timedelta(seconds=5), minimum=timedelta(0), maximum=timedelta(hours=1)
            ),
            trace_dir=environment.optional_path("SLUICE_TRACE_DIR"),
            otlp_endpoint=environment.optional_text("OTEL_EXPORTER_OTLP_ENDPOINT"),
            log_level=environment.choice("SLUICE_LOG_LEVEL", "INFO", ("DEBUG", "INFO", "WARNING", "ERROR")),
            log_format=LogFormat(environment.choice("SLUICE_LOG_FORMAT", "json", tuple(LogFormat))),
            crash_file=environment.optional_path("SLUICE_CRASH_FILE"),
            log_kept=environment.seconds(
                "SLUICE_LOG_KEPT_S", timedelta(minutes=10), minimum=timedelta(seconds=1), maximum=timedelta(days=1)
            ),
            retention=_days(environment.integer("SLUICE_RETENTION_DAYS", 30, minimum=0, maximum=36_500)),
            allows_unsafe_redis=environment.boolean("SLUICE_ALLOW_UNSAFE_REDIS", default=False),
            queue=_queue_bounds(environment),
            shares_prefixes=environment.boolean("SLUICE_SHARE_PREFIXES_BETWEEN_TENANTS", default=False),
        )


def _queue_bounds(environment: Environment) -> QueueSettings:
    """One number for each class's queue."""
    usual = QueueSettings()
    requests = environment.integer(
        "SLUICE_QUEUE_MAX_REQUESTS", usual.max_requests[0], minimum=1, maximum=_MOST_REQUESTS
    )
    prompt_tokens = environment.integer(
        "SLUICE_QUEUE_MAX_PROMPT_TOKENS", usual.max_prompt_tokens[0], minimum=1, maximum=_MOST_PROMPT_TOKENS
    )
    return QueueSettings(
        max_requests=(requests,) * 3,
        max_prompt_tokens=(prompt_tokens,) * 3,
        max_tenant_requests=environment.integer(
            "SLUICE_QUEUE_MAX_TENANT_REQUESTS", usual.max_tenant_requests, minimum=1, maximum=_MOST_REQUESTS
        ),
        max_tenant_prompt_tokens=environment.integer(
            "SLUICE_QUEUE_MAX_TENANT_PROMPT_TOKENS",
            usual.max_tenant_prompt_tokens,
            minimum=1,
            maximum=_MOST_PROMPT_TOKENS,
        ),
    )


def _days(number: int) -> timedelta | None:
    return timedelta(days=number) if number else None
