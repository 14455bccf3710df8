"""Whether new requests have a place in the queue, and when to ask again. Pure; used by every adapter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from scheduler.queue.codec import duration_us
from scheduler.queue.port import BoundCheck, BoundStatus, BoundVerdict, QueuePlaces
from scheduler.queue.settings import QueueSettings
from service_kit.errors import QueueBound
from service_kit.ids import TenantId

RATE_WINDOW = timedelta(seconds=5)
MIN_RETRY_AFTER = timedelta(seconds=0.5)
MAX_RETRY_AFTER = timedelta(seconds=30)
_SHARE_TO_LEAVE = 8
"""Refused callers are many: they come back when this part of the queue has left, not one entry."""


@dataclass(slots=True)
class Load:
    """Requests and prompt tokens that are queued somewhere."""

    requests: int = 0
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PopCount:
    """Entries popped of a model in window number `window` (whole `RATE_WINDOW`s since 1970) and in the one before."""

    window: int = 0
    popped: int = 0
    popped_before: int = 0

    def at(self, now_us: int) -> "PopCount":
        """The same count as seen at `now_us`."""
        window = now_us // duration_us(RATE_WINDOW)
        if window == self.window:
            return self
        return PopCount(window=window, popped_before=self.popped if window == self.window + 1 else 0)

    def plus_one(self, now_us: int) -> "PopCount":
        count = self.at(now_us)
        return PopCount(window=count.window, popped=count.popped + 1, popped_before=count.popped_before)

    def time_for(self, num_entries: int, now_us: int) -> timedelta:
        """How long `num_entries` take at the measured rate; unbounded (`timedelta.max`) while nothing is popped."""
        count = self.at(now_us)
        num_popped = count.popped + count.popped_before
        if num_popped == 0:
            return timedelta.max
        span = RATE_WINDOW + timedelta(microseconds=now_us % duration_us(RATE_WINDOW))
        return span * num_entries / num_popped


@dataclass(slots=True, kw_only=True)
class ModelLoad:
    """One model's queue as a check sees it; the check adds what it lets in."""

    now_us: int
    pops: PopCount
    num_tenants: int
    by_rank: Sequence[Load]
    by_tenant: Mapping[TenantId, Load] = field(default_factory=dict)


def judge_many(checks: Sequence[BoundCheck], load: ModelLoad, settings: QueueSettings) -> list[BoundVerdict]:
    """Verdicts for checks of one model, in order; `by_tenant` has every tenant of theirs."""
    return [_judge(check, load, settings) for check in checks]


def _judge(check: BoundCheck, load: ModelLoad, settings: QueueSettings) -> BoundVerdict:
    rank = check.priority_class.rank
    tenant, queue = load.by_tenant[check.tenant_id], load.by_rank[rank]
    excess = _excess(tenant, check, settings.max_tenant_requests, settings.max_tenant_prompt_tokens)
    if excess is not None:
        return BoundVerdict(
            status=BoundStatus.TENANT_FULL,
            bound=excess.bound,
            places=_places(check, load, settings),
            retry_after=_wait_of_tenant(excess.num_to_leave, load),
        )
    excess = _excess(queue, check, settings.max_requests[rank], settings.max_prompt_tokens[rank])
    if excess is not None:
        return BoundVerdict(
            status=BoundStatus.QUEUE_FULL,
            bound=excess.bound,
            places=_places(check, load, settings),
            retry_after=_wait(excess.num_to_leave, load),
        )
    for part in (tenant, queue):
        part.requests += 1
        part.prompt_tokens += check.prompt_tokens
    places = _places(check, load, settings)
    if places.tenant < places.queue:
        retry_after = _wait_of_tenant(_share_to_leave(tenant), load)
    else:
        retry_after = _wait(_share_to_leave(queue), load)
    return BoundVerdict(status=BoundStatus.FREE, places=places, retry_after=retry_after)


def _places(check: BoundCheck, load: ModelLoad, settings: QueueSettings) -> QueuePlaces:
    rank = check.priority_class.rank
    return QueuePlaces(
        queue=max(0, settings.max_requests[rank] - load.by_rank[rank].requests),
        tenant=max(0, settings.max_tenant_requests - load.by_tenant[check.tenant_id].requests),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Excess:
    """The bound that is reached, and about how many entries have to leave before the request has a place."""

    bound: QueueBound
    num_to_leave: int


def _excess(load: Load, check: BoundCheck, max_requests: int, max_prompt_tokens: int) -> _Excess | None:
    """None when it has a place now."""
    excess = max(0, load.requests + 1 - max_requests)
    bound = QueueBound.REQUESTS if excess else QueueBound.PROMPT_TOKENS
    excess_tokens = load.prompt_tokens + check.prompt_tokens - max_prompt_tokens
    if load.requests and excess_tokens > 0:
        mean_tokens = max(1, load.prompt_tokens // load.requests)
        excess = max(excess, -(-excess_tokens // mean_tokens))
    if not excess:
        return None
    return _Excess(bound=bound, num_to_leave=max(excess, _share_to_leave(load)))


def _share_to_leave(load: Load) -> int:
    return load.requests // _SHARE_TO_LEAVE


def _wait_of_tenant(num_to_leave: int, load: ModelLoad) -> timedelta:
    """The tenants that wait share what is popped."""
    return _wait(num_to_leave * max(1, load.num_tenants), load)


def _wait(num_to_leave: int, load: ModelLoad) -> timedelta:
    wait = load.pops.time_for(num_to_leave, load.now_us)
    return min(max(wait, MIN_RETRY_AFTER), MAX_RETRY_AFTER)
