"""Structured logs: constant event names, ids as fields, one line each. Never prompt text, output text or keys."""

import logging
import sys
from enum import StrEnum
from typing import TextIO, cast

import structlog
from opentelemetry import trace
from structlog.types import EventDict, Processor, WrappedLogger


class LogFormat(StrEnum):
    """How lines look: for machines, or for a person at a terminal."""

    JSON = "json"
    CONSOLE = "console"


def configure_logging(
    *, service: str, level: str = "INFO", log_format: LogFormat = LogFormat.JSON, stream: TextIO | None = None
) -> None:
    """Sets up structlog for the process, to stderr by default; once, from its composition root.

    Libraries that use the standard logging come out through it too, from WARNING on.
    """
    output = stream or sys.stderr
    level_number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _ServiceFields(service),
        structlog.processors.StackInfoRenderer(),
    ]
    renderer: list[Processor]
    if log_format is LogFormat.JSON:
        renderer = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        # Not its own tracebacks: they show what variables hold, which may be a prompt or a key.
        plain = structlog.dev.plain_traceback
        renderer = [structlog.dev.ConsoleRenderer(colors=output.isatty(), exception_formatter=plain)]
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level_number),
        logger_factory=structlog.PrintLoggerFactory(file=output),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(output)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(level_number, logging.WARNING), force=True)


class _ServiceFields:
    """Adds the service's name and the current trace to each event."""

    def __init__(self, service: str) -> None:
        self._service = service

    def __call__(self, _logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event["service"] = self._service
        span_context = trace.get_current_span().get_span_context()
        if span_context.is_valid:
            event["trace_id"] = trace.format_trace_id(span_context.trace_id)
        return event


def get_logger() -> structlog.typing.FilteringBoundLogger:
    """A logger that follows the configuration in force at each call."""
    return cast("structlog.typing.FilteringBoundLogger", structlog.get_logger())
