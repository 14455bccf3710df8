from datetime import UTC, datetime, timedelta


class SteppedClock:
    """An aware clock that moves only when told to."""

    def __init__(self, now: datetime = datetime(2030, 1, 1, tzinfo=UTC)) -> None:
        self._now = now

    def __call__(self) -> datetime:
        return self._now

    def advance(self, duration: timedelta) -> None:
        self._now += duration
