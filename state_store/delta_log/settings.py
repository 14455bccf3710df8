"""Times and bounds of the delta log. Pure."""

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """`live_retention` is a net, renewed by open and append: it only bounds what a lost terminal seal would leak.

    `watch_retention` keeps when a generation without a log was last watched; with a log it is kept as long as the log. A longer list than `max_items_per_call` is sent as several script calls, so that none blocks the server long.
    """

    watch_lease: timedelta = timedelta(seconds=15)
    terminal_retention: timedelta = timedelta(minutes=10)
    live_retention: timedelta = timedelta(hours=48)
    watch_retention: timedelta = timedelta(hours=1)
    max_items_per_call: int = 512
