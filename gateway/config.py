from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from service_kit.internal_access import InternalAccess
from service_kit.tls import ServerTls


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """Bounds and clocks of client streams.

    max_buffered_pushes: news held for one reader; when full they are dropped and the reader goes on from the log.
    silence: after so long without news log and row are checked. tick: how often the hub looks. watch_refresh: how often
    the leases of watched generations (15 s) are renewed. bulk: ids in one question to log or store.
    max_tokens_per_message: a longer replay is cut into several messages.
    """

    max_buffered_pushes: int = 256
    silence: timedelta = timedelta(seconds=1.5)
    tick: timedelta = timedelta(seconds=0.25)
    watch_refresh: timedelta = timedelta(seconds=5)
    bulk: int = 500
    max_tokens_per_message: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizationLimits:
    """Threads that render and encode, and how many requests may wait for them (more are refused as UNAVAILABLE).

    max_prompt_bytes bounds every prompt before it is encoded; a model's own context may bound it lower.
    """

    num_threads: int = 2
    max_waiting: int = 1024
    max_prompt_bytes: int = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Everything the gateway is told from outside. `crash_file` arms the crash points of tests."""

    postgres_dsn: str = field(repr=False)
    redis_url: str = field(repr=False)
    listen: str
    schedulers: tuple[str, ...]
    models_dir: Path
    trace_dir: Path | None = None
    otlp_endpoint: str | None = None
    log_level: str = "INFO"
    log_format: str = "json"
    access: InternalAccess = field(default_factory=InternalAccess)
    tls: ServerTls | None = None
    drain: timedelta = timedelta(seconds=20)
    start_timeout: timedelta = timedelta(seconds=60)
    models_rescan: timedelta = timedelta(seconds=5)
    allows_unsafe_redis: bool = False
    streams: StreamLimits = StreamLimits()
    tokenization: TokenizationLimits = TokenizationLimits()
    crash_file: Path | None = None
