"""What an operator asks about all tenants. Pure. Read-only, and not for the hot path."""

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from service_kit.ids import SessionId, TenantId
from state_store.model import GenerationSummary, ModelKey, PriorityClass, State


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFilter:
    """Which generations; None, and no state, is any. `since` is the earliest time of acceptance, by the id."""

    tenant_id: TenantId | None = None
    states: tuple[State, ...] = ()
    model: str | None = None
    priority_class: PriorityClass | None = None
    since: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRows:
    """QUEUED rows of one model and class. `oldest_at`: since when the oldest one waits, for its first or a later attempt."""

    model: str
    model_key: ModelKey
    priority_class: PriorityClass
    count: int
    prompt_tokens: int
    oldest_at: datetime


class OverviewStore(Protocol):
    """All methods raise `StoreUnavailableError` when the store cannot be reached."""

    async def find_generations(self, wanted: GenerationFilter, *, limit: int) -> list[GenerationSummary]:
        """Newest first."""

    async def running_by_session(self) -> dict[SessionId, int]:
        """How many RUNNING rows name each session; sessions without any are left out."""

    async def queued_rows(self) -> list[QueuedRows]:
        """By model and class."""
