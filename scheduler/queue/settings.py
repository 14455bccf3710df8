"""Times and bounds of the admission queue. Pure."""

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """Tuples are by rank of the class. Bounds are on what is queued, delayed included; what is in flight does not count."""

    max_requests: tuple[int, int, int] = (10_000, 10_000, 10_000)
    """Of one (model, class)."""
    max_prompt_tokens: tuple[int, int, int] = (20_000_000, 20_000_000, 20_000_000)
    max_tenant_requests: int = 2_000
    """Of one (model, tenant), over all classes."""
    max_tenant_prompt_tokens: int = 4_000_000
    wait_thresholds: tuple[timedelta, timedelta, timedelta] = (
        timedelta(seconds=2),
        timedelta(seconds=10),
        timedelta(seconds=30),
    )
    """How long an entry of a class waits before it may be the one of every 8 that goes out of class order."""
    pop_hold: timedelta = timedelta(seconds=4)
    """How long a popped entry stays in flight before a reap puts it back."""
    skip_patience: timedelta = timedelta(seconds=2)
    """How long a head is skipped before it earmarks a session."""
    starving_after: timedelta = timedelta(seconds=30)
    """How long one is skipped before a session is closed to all others, of every class, until it fits there."""
    earmark_lease: timedelta = timedelta(seconds=5)
    """How long an earmark outlives the last pop that named its session."""
    max_passed: int = 8
    """Heads of a class that do not fit and that one pop looks past."""
    max_passed_of_tenant: int = 4
    max_oversized: int = 64
    """Heads beside those, too large for any of the sessions even when empty: they wait for a larger one. Where there are
    more, their tenants are looked past, at most as many again."""
    rebase_counters_at: int = 2**50
    """Counters are in millionths of a token; where the smallest reaches this, it is subtracted from all, so that they stay
    exact in the server's doubles."""
