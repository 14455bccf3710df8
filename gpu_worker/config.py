"""Settings of the worker's service process."""

import json
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from gpu_worker.delta_pace import DELTAS_PER_S_AND_CORE, DeltaPace
from gpu_worker.engine.host_resources import available_threads
from gpu_worker.speculation.settings import MODES
from service_kit.environment import Environment, EnvironmentVariableError
from service_kit.internal_access import InternalAccess
from service_kit.logging import LogFormat

SIMULATED_PRECISION = "sim"
_ENGINES = ("auto", "native", "simulated")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """`advertise` is where schedulers reach this worker. `engine` "auto" takes what the model's precision asks for.

    `engine_settings` are the fields of SimulatedSettings or EngineSettings, as JSON; `speculation` are some more of the
    latter, which have variables of their own.
    """

    listen: str
    advertise: str
    worker_id: str
    schedulers: tuple[str, ...]
    model_directory: Path
    engine: str
    engine_settings: dict[str, Any] = field(default_factory=dict)
    speculation: dict[str, Any] = field(default_factory=dict)
    access: InternalAccess
    start: timedelta
    drain: timedelta
    hang: timedelta
    pace: DeltaPace
    trace_dir: Path | None
    otlp_endpoint: str | None
    log_level: str
    log_format: LogFormat

    @classmethod
    def from_environment(cls, environment: Environment) -> "WorkerConfig":
        """Raises EnvironmentVariableError, which names the variable."""
        listen = environment.text("SLUICE_WORKER_LISTEN", "127.0.0.1:7301")
        advertise = environment.text("SLUICE_WORKER_ADVERTISE", listen)
        second, hour = timedelta(seconds=1), timedelta(hours=1)
        return cls(
            listen=listen,
            advertise=advertise,
            worker_id=environment.text("SLUICE_WORKER_ID", advertise),
            schedulers=environment.texts("SLUICE_SCHEDULERS"),
            model_directory=environment.path("SLUICE_MODEL_DIR"),
            engine=environment.choice("SLUICE_ENGINE", "auto", _ENGINES),
            engine_settings=_read_settings(environment),
            speculation=_read_speculation(environment),
            access=InternalAccess.from_environment(environment),
            start=environment.seconds("SLUICE_ENGINE_START_S", timedelta(minutes=10), minimum=second, maximum=hour),
            drain=environment.seconds("SLUICE_DRAIN_S", timedelta(seconds=20), minimum=timedelta(0), maximum=hour),
            hang=environment.seconds("SLUICE_ENGINE_HANG_S", timedelta(seconds=10), minimum=second, maximum=hour),
            pace=_read_pace(environment),
            trace_dir=environment.optional_path("SLUICE_TRACE_DIR"),
            otlp_endpoint=environment.optional_text("OTEL_EXPORTER_OTLP_ENDPOINT"),
            log_level=environment.choice("SLUICE_LOG_LEVEL", "INFO", ("DEBUG", "INFO", "WARNING", "ERROR")),
            log_format=LogFormat(environment.choice("SLUICE_LOG_FORMAT", "json", tuple(LogFormat))),
        )

    def check_engine(self, precision: str) -> None:
        """Raises EnvironmentVariableError when the model in the directory is not for the engine that was asked for."""
        fitting = "simulated" if precision == SIMULATED_PRECISION else "native"
        if self.engine not in {"auto", fitting}:
            raise EnvironmentVariableError("SLUICE_ENGINE", f"a model of precision {precision} needs engine {fitting}")

    def settings_for(self, precision: str) -> dict[str, Any]:
        """Of the engine for a model of that precision. Raises EnvironmentVariableError when it has no such settings."""
        if precision != SIMULATED_PRECISION:
            return {**self.engine_settings, **self.speculation}
        if self.speculation.get("speculation", "off") not in {"auto", "off"}:
            raise EnvironmentVariableError("SLUICE_SPECULATION", "the simulated engine does not speculate")
        return self.engine_settings


def _read_settings(environment: Environment) -> dict[str, Any]:
    name = "SLUICE_ENGINE_SETTINGS"
    try:
        settings = json.loads(environment.text(name, "{}"))
    except ValueError as error:
        raise EnvironmentVariableError(name, f"is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise EnvironmentVariableError(name, "must be a JSON object")
    return settings


def _read_pace(environment: Environment) -> DeltaPace:
    default = DELTAS_PER_S_AND_CORE * available_threads()
    deltas_per_s = environment.number("SLUICE_MAX_DELTAS_PER_S", default, minimum=0, maximum=1e9)
    return DeltaPace(deltas_per_s=deltas_per_s) if deltas_per_s else DeltaPace()


def _read_speculation(environment: Environment) -> dict[str, Any]:
    """Only what is set, so that the rest comes from the engine's settings and defaults."""
    found: dict[str, Any] = {}
    if environment.optional_text("SLUICE_SPECULATION"):
        found["speculation"] = environment.choice("SLUICE_SPECULATION", "auto", MODES)
    if (draft_model := environment.optional_path("SLUICE_DRAFT_MODEL_DIR")) is not None:
        found["draft_model"] = str(draft_model)
    if environment.optional_text("SLUICE_MAX_DRAFT_TOKENS"):
        found["max_draft_tokens"] = environment.integer("SLUICE_MAX_DRAFT_TOKENS", 1, minimum=1, maximum=64)
    return found
