"""Times and bounds of the quotas. Pure."""

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaSettings:
    """`lease`: an unbound reservation is compared with Postgres when it is so old; with the reaper's second it is back
    within ten. `recheck`: how often a bound one is compared. `settled_kept`: for how long a bind that was overtaken by its
    settlement is recognised. `rebuild_hold`: how long a rebuild may pause between two calls before another takes over.
    A longer list than `max_items_per_call` is sent as several script calls, so that none blocks the server long.
    """

    lease: timedelta = timedelta(seconds=8)
    recheck: timedelta = timedelta(seconds=15)
    settled_kept: timedelta = timedelta(seconds=60)
    rebuild_hold: timedelta = timedelta(seconds=3)
    max_items_per_call: int = 256
