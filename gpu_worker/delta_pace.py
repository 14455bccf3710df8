"""How often the streams of a worker get their tokens: each at once while streams are few, several together when they are many.

A delta costs about half a millisecond of processor time on its way through scheduler, stores and gateway to the client,
however many tokens are in it. Many streams of a fast engine would so take the processor from the engine, where both share one.
"""

import math
from dataclasses import dataclass
from datetime import timedelta

DELTAS_PER_S_AND_CORE = 160
"""By default: with all services on the same cores, what goes through them takes about a twelfth of their time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaPace:
    """At most `deltas_per_s`, all streams of the worker together, unless that would keep a token longer than `longest`. The
    first token of an attempt and its end never wait, and are not counted."""

    deltas_per_s: float = math.inf
    longest: timedelta = timedelta(milliseconds=100)

    def pause_s(self, num_streams: int) -> float:
        """Between two deltas of a stream."""
        return min(self.longest.total_seconds(), num_streams / self.deltas_per_s)
