"""When a child that died is started again. Pure."""

from dataclasses import dataclass

_FIRST_DELAY_S = 0.25
_MAX_DELAY_S = 10.0
_STEADY_S = 30.0


@dataclass(slots=True)
class RestartClock:
    """Deaths in a row of one child. The delay doubles with each; a child that lived for 30 s starts afresh."""

    deaths: int = 0
    started_s: float = 0.0
    due_s: float | None = None

    def started(self, now_s: float) -> None:
        self.started_s = now_s
        self.due_s = None

    def died(self, now_s: float) -> float:
        """Record a death, once per start; returns the delay until the restart."""
        self.deaths = 1 if now_s - self.started_s >= _STEADY_S else self.deaths + 1
        delay_s = min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(self.deaths - 1, 16))
        self.due_s = now_s + delay_s
        return delay_s

    def is_due(self, now_s: float) -> bool:
        return self.due_s is not None and now_s >= self.due_s
