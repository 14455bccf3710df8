"""What the durable record says about quotas: which reservations there must be, and what has been used. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from service_kit.ids import GenerationId
from state_store.quota.port import PastUse, QuotaCharge


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaRecord:
    """A generation as its quota sees it; `used_tokens` is None while it is live."""

    charge: QuotaCharge
    used_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaUse:
    """All that counts: every generation is in one of both, never in neither or both."""

    live: tuple[QuotaCharge, ...]
    past: tuple[PastUse, ...]


class QuotaRecords(Protocol):
    """Reads of the store, for the upkeep of quotas. All of them raise StoreUnavailableError."""

    async def quota_records(self, generation_ids: Sequence[GenerationId]) -> list[QuotaRecord | None]:
        """None where no generation has the id."""

    async def live_charges_page(self, *, after: GenerationId | None, limit: int) -> list[QuotaCharge]:
        """Live generations with ids above `after`, by id."""

    async def quota_use(self, *, now: datetime | None = None) -> QuotaUse:
        """What counts now. A generation counts in the day and month in which its id was made."""
