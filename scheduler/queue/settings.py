"""Times and bounds of the admission queue. Pure."""

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """`max_entries` bounds the queued entries of one (model, class); requeues are exempt. `pop_hold` is how long a popped
    entry stays in flight before a reap puts it back."""

    max_entries: int = 10_000
    pop_hold: timedelta = timedelta(seconds=4)
