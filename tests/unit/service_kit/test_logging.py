import io
import json
import logging

import pytest
import structlog
from opentelemetry import trace

from service_kit.logging import LogFormat, configure_logging, get_logger
from service_kit.telemetry import context_from_traceparent

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def stream():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield io.StringIO()
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_an_event_is_one_json_line_with_service_and_trace(stream: io.StringIO) -> None:
    configure_logging(service="gateway", level="INFO", stream=stream)
    log = get_logger()
    log.debug("left_out")
    with trace.use_span(trace.get_current_span(context_from_traceparent(TRACEPARENT))):
        log.info("generation_accepted", generation_id="g1")
    fields = json.loads(stream.getvalue())
    assert fields["event"] == "generation_accepted"
    assert (fields["service"], fields["generation_id"], fields["level"]) == ("gateway", "g1", "info")
    assert fields["trace_id"] == "0af7651916cd43dd8448eb211c80319c"


def test_libraries_come_out_in_the_same_form(stream: io.StringIO) -> None:
    configure_logging(service="gateway", stream=stream)
    logging.getLogger("library").warning("something %s", "odd")
    logging.getLogger("library").info("left out")
    fields = json.loads(stream.getvalue())
    assert (fields["event"], fields["service"]) == ("something odd", "gateway")


def test_the_console_form_is_readable(stream: io.StringIO) -> None:
    configure_logging(service="gateway", log_format=LogFormat.CONSOLE, stream=stream)
    get_logger().info("started", port=1)
    assert "started" in stream.getvalue()
    assert "port=1" in stream.getvalue()


@pytest.mark.parametrize("log_format", LogFormat)
def test_a_traceback_does_not_show_what_variables_hold(log_format: LogFormat, stream: io.StringIO) -> None:
    configure_logging(service="gateway", log_format=log_format, stream=stream)
    _fail_and_log("what somebody asked")
    logged = stream.getvalue()
    assert "ZeroDivisionError" in logged
    assert "in _fail_and_log" in logged
    assert "what somebody asked" not in logged


def _fail_and_log(prompt: str) -> None:
    try:
        assert len(prompt) / 0
    except ZeroDivisionError:
        get_logger().exception("failed")
