"""The admission queue: a fair index of QUEUED generations, shared by all schedulers, that can be rebuilt from Postgres.

One queue per model key. Entries are hints keyed (generation, attempt). A pop moves them to an in-flight set under a pop id
for `QueueSettings.pop_hold`; only the grant in Postgres decides. All methods raise `QueueUnavailableError` when the queue
cannot be reached, and `QueueNotReadyError` while its marker is absent (emptied and not yet rebuilt).

Order of a pop, atomic over all schedulers:

- Classes strictly in order, but of every 8 entries popped of a model one is the oldest that has waited beyond its class's
  threshold, of any class. While one of a higher class waits it goes as urgent: by the room of the highest class, and as one
  of it until its attempt ends.
- Inside a class the tenant with the smallest virtual token counter (VTC; Sheng et al., "Fairness in Serving Large Language
  Models", OSDI 2024). Counters are per (model, tenant), one for all classes: tokens served / weight. The prompt is charged
  at the pop of attempt 0 (what was granted before is free) and refunded when the pop ends without a grant; output is
  charged through `charge_many`. A tenant that gets its first waiting entry is lifted to the smallest counter of the tenants
  that wait; when none waits, to the floor: the counter that the last served tenant had before its last pop. A counter that
  lifting would give back as well is forgotten once its tenant has no entries.
- Inside a tenant the earliest `order_at`, then the generation id (UUIDv7: arrival).

Heads that fit none of the rooms given are looked past, of a class at most `max_passed` in a pop and `max_passed_of_tenant`
of one tenant; since when each is skipped is remembered. One skipped for `skip_patience` earmarks a session that could hold
it when empty: from then that session takes nothing else of its class or a lower one (higher classes go on) until it fits
there and is popped for it, leaves the queue, or is popped for another session. An earmark is a lease, renewed by each pop
that names the session. At most one per session and per entry. The rule of age is not held up by the earmark of a younger
entry.

One skipped for `starving_after` starves: when it is the turn of age, its session (another one's, if it has none) is closed
to every class until it fits there by the room of the highest, and it goes as urgent. One of a model at a time, so that the
higher classes get 7 of every 8 all the same.

Heads too large for every session named, even when empty, are looked past beside those, at most `max_oversized` of a class:
they wait for another session. Behind these, a tenant with such a head takes no part in the pop with that class.

Entries whose deadline has passed leave every structure in any pop, bound check or depth. Delayed ones (`ready_at`) wait
aside, then return to their old place; they count as queued.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Protocol

from service_kit.errors import QueueBound
from service_kit.ids import GenerationId, SessionId, TenantId
from state_store.model import ModelKey, PriorityClass

ByClass = tuple[int, int, int]
"""Indexed by the rank of the priority class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEntry:
    """`attempt` is the number of attempts granted before; a requeued generation has a new key and its old place."""

    generation_id: GenerationId
    attempt: int
    model_key: ModelKey
    tenant_id: TenantId
    weight: float = 1.0
    """Of the tenant, above 0: its share beside tenants of weight 1."""
    priority_class: PriorityClass
    prompt_tokens: int
    """Charged at the pop of attempt 0, and counted by the bounds."""
    max_tokens: int
    """The room it needs at once: its context and one token."""
    arrived_at: datetime
    """When it was accepted: its age for the 1-in-8 rule."""
    order_at: datetime
    """Its place inside the tenant, earliest first: the earlier of deadline and queue deadline, also after a requeue."""
    deadline_at: datetime | None
    """When it leaves the queue by itself."""
    ready_at: datetime | None = None
    """Not to be popped before; None: at once."""
    is_charged: bool = False
    """Whether an attempt of it has been charged: a session takes one such entry at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRoom:
    """What one session can take now. The numbers per class count everything popped for the session in this call; a higher
    class has at least the room of a lower one, whose memory it may take."""

    session_id: SessionId
    max_entries: ByClass
    """An entry of a class fits while fewer were popped. A class without any is closed: its heads do not count as skipped."""
    max_tokens: ByClass
    """An entry fits while the sum of `max_tokens`, its own included, is at most its class's."""
    capacity_tokens: int
    """What the session could hold when empty; only what fits into it may earmark the session."""
    max_charged: int = 1
    """Charged entries beyond these are passed over without counting as skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Popped:
    """`session_id` is the session whose room it was counted against, the one with most tokens left where it fits. The
    dispatcher may prefer another one, but none of those that are `kept` for others: earmarked, of its class or a higher
    one.

    `is_urgent`: taken out of class order, by the rule of age while a higher class waits or because it starved. Until this
    attempt ends it is judged like an entry of the highest class, so that nothing that comes later goes before it."""

    entry: QueueEntry
    pop_id: str
    session_id: SessionId
    kept: frozenset[SessionId] = frozenset()
    is_urgent: bool = False

    @property
    def rank(self) -> int:
        """What it is judged by."""
        return 0 if self.is_urgent else self.entry.priority_class.rank


class EnqueueStatus(StrEnum):
    ADDED = "ADDED"
    PRESENT = "PRESENT"
    """Already queued or in flight with this attempt or a higher one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundCheck:
    """A new request that asks for a place."""

    model_key: ModelKey
    tenant_id: TenantId
    priority_class: PriorityClass
    prompt_tokens: int


class BoundStatus(StrEnum):
    FREE = "FREE"
    TENANT_FULL = "TENANT_FULL"
    """The tenant's own bound on this model is reached, whatever the others do."""
    QUEUE_FULL = "QUEUE_FULL"
    """The bound of the class's queue of this model is reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePlaces:
    """How many more requests fit behind the one that was judged: into its class's queue, and into its tenant's part."""

    queue: int
    tenant: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundVerdict:
    """`retry_after` is when to ask again, here or where no place is left, estimated from the model's measured pop rate:
    between 0.5 s and 30 s. `bound` is None when FREE, else what was reached: REQUESTS where both are."""

    status: BoundStatus
    places: QueuePlaces
    bound: QueueBound | None = None
    retry_after: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputCharge:
    """Output tokens that were appended for the first time."""

    model_key: ModelKey
    tenant_id: TenantId
    weight: float = 1.0
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDepth:
    """What one model's queue holds. `requests` and `prompt_tokens` are queued ones by class, `delayed` of them wait aside;
    `in_flight` is popped and not settled; `num_tenants` have an entry of either kind."""

    requests: ByClass
    prompt_tokens: ByClass
    delayed: int
    in_flight: int
    num_tenants: int

    @property
    def num_queued(self) -> int:
        return sum(self.requests)


class AdmissionQueue(Protocol):
    """Shared by all schedulers. Lists may mix models; items of one call take effect in their order, model by model."""

    async def check_many(self, checks: Sequence[BoundCheck]) -> list[BoundVerdict]:
        """Whether new requests have a place, by the bounds of `QueueSettings`. Changes nothing.

        Items that are FREE count for those behind them. Asked before the commit; what is committed is queued in any case,
        so several schedulers overshoot a bound by at most what they commit at once. A bound in prompt tokens never
        refuses what is alone.
        """

    async def enqueue_many(self, entries: Sequence[QueueEntry], *, is_rebuild: bool = False) -> list[EnqueueStatus]:
        """Adds entries, never bounded; an older attempt's entry of the same generation is replaced. Idempotent.

        With `is_rebuild` accepted without the marker as well: that is how the queue is filled before `mark_ready`.
        """

    async def pop(self, model_key: ModelKey, rooms: Sequence[SessionRoom], *, max_entries: int) -> list[Popped]:
        """Moves at most `max_entries` that fit the rooms to the in-flight set, in the order they are to be granted in, and
        charges their prompts. Each must be ended by `ack_many`, `drop_many` or `return_many`, or `reap_in_flight` does."""

    async def ack_many(self, popped: Sequence[Popped]) -> None:
        """Granted: forgets the entries of exactly these pops; their charge stands. Idempotent."""

    async def drop_many(self, popped: Sequence[Popped]) -> None:
        """Not to be granted any more: forgets the entries of exactly these pops and refunds their charge. Idempotent."""

    async def return_many(self, popped: Sequence[Popped]) -> None:
        """Puts the entries of exactly these pops back at their old place and refunds their charge. Idempotent."""

    async def charge_many(self, charges: Sequence[OutputCharge]) -> None:
        """Adds output tokens, divided by the weight, to the tenants' counters. Not idempotent: each token once."""

    async def remove_many(self, items: Sequence[tuple[ModelKey, GenerationId]]) -> None:
        """Cancelled, expired or finished: leaves every structure at once; what is in flight is refunded. Unknown ids are
        ignored."""

    async def contains_many(self, items: Sequence[tuple[ModelKey, GenerationId, int]]) -> list[bool]:
        """Whether (generation, attempt) is queued, delayed or in flight."""

    async def reap_in_flight(self, model_keys: Sequence[ModelKey]) -> int:
        """Puts back and refunds entries whose pop is older than the hold; returns how many."""

    async def depth(self, model_key: ModelKey) -> QueueDepth:
        """What is queued and in flight now."""

    async def model_keys(self) -> list[ModelKey]:
        """Models that have entries, queued or in flight, in no particular order."""

    async def is_ready(self) -> bool:
        """Whether the marker is there."""

    async def mark_ready(self) -> None:
        """Sets the marker; the caller has just enqueued every QUEUED row."""
