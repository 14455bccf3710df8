"""Metrics: the OpenTelemetry SDK's meter provider, and what every service counts.

Labels are constant words; never ids, and nothing that a caller chooses.
"""

from datetime import timedelta

from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import SERVICE_NAME, Resource

from service_kit.errors import Reason
from service_kit.telemetry import OtlpExporterMissingError

_EXPORT_INTERVAL = timedelta(seconds=10)
_MAX_SHUTDOWN = timedelta(seconds=2)
_NO_MESSAGE = "NO_MESSAGE"
_OTHER = "OTHER"
_REASONS = frozenset(reason.value for reason in Reason)

_errors = metrics.get_meter("sluice").create_counter(
    "sluice.rpc.errors", unit="{call}", description="Calls that ended with an error, refusals included, by reason."
)


def count_error(reason: str) -> None:
    """A call that ends with an error of this reason. Words that are none of ours, as of another version's peer, count as
    OTHER."""
    _errors.add(1, {"reason": reason if reason in _REASONS else _OTHER})


def count_call_without_message() -> None:
    """Of a call whose request never came whole: larger than the server takes, or its caller left before."""
    _errors.add(1, {"reason": _NO_MESSAGE})


class Metrics:
    """Owner of the process's meter provider. `shutdown` sends what was counted; calling it again does nothing."""

    def __init__(self, provider: MeterProvider) -> None:
        self._provider = provider
        self._is_shut_down = False

    def shutdown(self) -> None:
        if not self._is_shut_down:
            self._is_shut_down = True
            self._provider.shutdown(timeout_millis=_MAX_SHUTDOWN.total_seconds() * 1000)


def setup_metrics(
    *, service_name: str, otlp_endpoint: str | None = None, reader: MetricReader | None = None
) -> Metrics:
    """Makes the process's meter provider; once per process, from its composition root.

    `otlp_endpoint` gets OTLP over gRPC every 10 s, when the exporter package is installed; `reader` is for tests. With
    neither, nothing is kept. Raises OtlpExporterMissingError.
    """
    readers = [] if reader is None else [reader]
    if otlp_endpoint:
        interval_ms = _EXPORT_INTERVAL.total_seconds() * 1000
        readers.append(PeriodicExportingMetricReader(_otlp_exporter(otlp_endpoint), interval_ms))
    provider = MeterProvider(readers, resource=Resource.create({SERVICE_NAME: service_name}))
    metrics.set_meter_provider(provider)
    return Metrics(provider)


def _otlp_exporter(endpoint: str) -> MetricExporter:
    try:
        # An optional extra, as for spans.
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter  # noqa: PLC0415
    except ImportError as error:
        raise OtlpExporterMissingError("OTEL_EXPORTER_OTLP_ENDPOINT is set: install the extra sluice[otlp]") from error
    exporter: MetricExporter = OTLPMetricExporter(endpoint=endpoint)
    return exporter
