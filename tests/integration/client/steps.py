"""What tests of the client do again and again."""

from collections.abc import AsyncIterator

from sluice.client_events import (
    Event,
    Output,
)


class FakeTime:
    """Sleeping moves the clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.sleeps: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now_s += seconds

    def clock(self) -> float:
        return self.now_s


async def collect(events: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in events]


async def append_all(seen: list[Event], events: AsyncIterator[Event]) -> None:
    async for event in events:
        seen.append(event)  # noqa: PERF401 - `seen` keeps what came before an error


def output_ids(events: list[Event]) -> tuple[int, ...]:
    return tuple(token_id for event in events if isinstance(event, Output) for token_id in event.token_ids)
