"""What limits say about one request: from counts to standings and refusals. Pure; both adapters use it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

from state_store.quota.errors import LimitReachedError
from state_store.quota.port import QuotaKind, QuotaScope, QuotaStanding, QuotaSubject

KINDS = tuple(QuotaKind)
"""In the order of the scripts."""
WINDOW_S = 60
"""A minute is any 60 s. Counts are kept by the second, so one is let go when its whole second has left the window."""
LIVE_RETRY = timedelta(seconds=1)
"""When to come back for a place that the end of a live generation frees: nobody knows when that is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One limit against its count. `wait` is when what was asked for fits; None when it fits now."""

    scope: QuotaScope
    kind: QuotaKind
    limit: int
    used: int
    reset: timedelta
    wait: timedelta | None = None


def limits_of(subject: QuotaSubject) -> Iterator[tuple[QuotaScope, QuotaKind, int | None]]:
    """The tenant's limits, then the key's, each in the order of `KINDS`."""
    for scope, limits in ((QuotaScope.TENANT, subject.tenant_limits), (QuotaScope.KEY, subject.key_limits)):
        for kind in KINDS:
            yield scope, kind, getattr(limits, kind.value)


def is_limited(subject: QuotaSubject) -> bool:
    return any(limit is not None for _, _, limit in limits_of(subject))


def standing_of(measures: Sequence[Measure]) -> list[QuotaStanding]:
    return [
        QuotaStanding(
            scope=measure.scope,
            kind=measure.kind,
            limit=measure.limit,
            remaining=max(0, measure.limit - measure.used),
            reset=measure.reset,
        )
        for measure in measures
    ]


def refusal_of(subject: QuotaSubject, measures: Sequence[Measure]) -> LimitReachedError:
    """The error for measures of which at least one has to wait: it names the one that waits longest."""
    worst, wait = max(
        ((measure, measure.wait) for measure in measures if measure.wait is not None), key=lambda pair: pair[1]
    )
    owner = subject.tenant_id if worst.scope is QuotaScope.TENANT else subject.key_id
    return LimitReachedError(
        f"{worst.kind.value} of this {worst.scope.value} is limited to {worst.limit}, of which {worst.used} are used",
        subject=f"{worst.scope.value}:{owner}:{worst.kind.value}",
        retry_after=wait,
        standing=tuple(standing_of(measures)),
    )
