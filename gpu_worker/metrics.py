"""What a worker counts, from the load reports of its engines."""

from opentelemetry.metrics import Meter

from gpu_worker.engine.port import LoadReport

_COUNTERS = {
    "num_draft_steps": ("steps", "{step}", "How often a step verified proposed tokens of a sequence."),
    "num_draft_tokens": ("proposed_tokens", "{token}", "Proposed tokens that were verified."),
    "num_accepted_draft_tokens": ("accepted_tokens", "{token}", "Proposed tokens that the model drew as well."),
    "num_speculation_stops": (
        "stops",
        "{stop}",
        "How often speculation went off, because it did not pay or had failed.",
    ),
}
"""By field of the load report: name behind `sluice.speculation.`, unit, description."""


class WorkerMetrics:
    """Counts on where an engine's counters start again at zero because it is a new one."""

    def __init__(self, meter: Meter) -> None:
        self._counters = {
            field: meter.create_counter(f"sluice.speculation.{name}", unit=unit, description=description)
            for field, (name, unit, description) in _COUNTERS.items()
        }
        self._is_on = meter.create_gauge(
            "sluice.speculation.is_on", description="1 while tokens are proposed, 0 while that does not pay."
        )
        self._step = 0
        self._counted = dict.fromkeys(_COUNTERS, 0)
        self._was_speculating: bool | None = None

    def take(self, load: LoadReport) -> None:
        """The report of each step, in order."""
        if load.step <= self._step:
            self._counted = dict.fromkeys(_COUNTERS, 0)
        self._step = load.step
        for field, counter in self._counters.items():
            count: int = getattr(load, field)
            if count > self._counted[field]:
                counter.add(count - self._counted[field])
                self._counted[field] = count
        if load.is_speculating is not self._was_speculating:
            self._was_speculating = load.is_speculating
            self._is_on.set(int(load.is_speculating))
