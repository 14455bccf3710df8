"""The admission queue: an index of QUEUED generations that can always be rebuilt from Postgres.

Entries are hints keyed (generation, attempt). A pop moves them to an in-flight set for 4 s under a pop id; only the grant
in Postgres decides. All methods raise `QueueUnavailableError` when the queue cannot be reached, and
`QueueNotReadyError` while its marker is absent (emptied and not yet rebuilt).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Protocol

from service_kit.ids import GenerationId, TenantId
from state_store.model import ModelKey, PriorityClass


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEntry:
    """`attempt` is the number of attempts granted before; a requeued generation has a new key and its old place
    (`arrived_at` is when it was accepted). `prompt_tokens` is the cost charged at pop, `max_tokens` the room it needs."""

    generation_id: GenerationId
    attempt: int
    model_key: ModelKey
    tenant_id: TenantId
    priority_class: PriorityClass
    prompt_tokens: int
    max_tokens: int
    arrived_at: datetime
    deadline_at: datetime | None
    is_charged: bool = False
    """Whether an attempt of it has been charged: a session takes one such entry at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Popped:
    entry: QueueEntry
    pop_id: str


class EnqueueStatus(StrEnum):
    ADDED = "ADDED"
    PRESENT = "PRESENT"
    """Already queued or in flight with this attempt or a higher one."""
    FULL = "FULL"
    """The bound of the class's queue is reached; nothing was added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What sessions of a model can take now.

    `max_tokens` is by rank of the class: an entry fits while the sum of `max_tokens` of this pop, itself included, is at
    most its class's. A higher class has at least the room of a lower one, whose memory it may take. Charged entries beyond
    `max_charged` keep their place, and what comes behind them goes first.
    """

    max_entries: int
    max_tokens: tuple[int, int, int]
    max_charged: int = 1


class AdmissionQueue(Protocol):
    """Class order, then arrival. Shared by all schedulers."""

    async def enqueue_many(self, entries: Sequence[QueueEntry], *, is_bounded: bool) -> list[EnqueueStatus]:
        """Adds entries; an older attempt's entry of the same generation is replaced. Requeues pass is_bounded=False.

        Unbounded entries are accepted without the marker as well: that is how the queue is rebuilt before `mark_ready`.
        """

    async def pop(self, model_key: ModelKey, room: Room) -> list[Popped]:
        """Moves up to `room` to the in-flight set. Expired entries (deadline_at) are skipped, not returned."""

    async def ack_many(self, popped: Sequence[Popped]) -> None:
        """Granted, or not to be granted any more: forgets the in-flight entries of exactly these pops."""

    async def return_many(self, popped: Sequence[Popped]) -> None:
        """Puts entries of exactly these pops back at their old place."""

    async def remove_many(self, items: Sequence[tuple[ModelKey, GenerationId]]) -> None:
        """Cancelled, expired or finished: leaves every structure at once. Unknown ids are ignored."""

    async def contains_many(self, items: Sequence[tuple[ModelKey, GenerationId, int]]) -> list[bool]:
        """Whether (generation, attempt) is queued or in flight."""

    async def reap_in_flight(self, model_keys: Sequence[ModelKey]) -> int:
        """Puts back entries whose pop is older than 4 s; returns how many."""

    async def depth(self, model_key: ModelKey) -> dict[PriorityClass, int]:
        """Queued entries by class, in-flight ones not counted."""

    async def is_ready(self) -> bool:
        """Whether the marker is there."""

    async def mark_ready(self) -> None:
        """Sets the marker; the caller has just enqueued every QUEUED row."""
