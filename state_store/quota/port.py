"""Quotas: what tenants and keys have used and reserved, counted in one place for all gateways.

A reservation is named by the generation id. The gateway makes it before it submits; it is leased, and the commit of the
generation binds it. Bound ones are settled by the terminal path, or by the reaper when the row is final. The counts are an
index: they are rebuilt from Postgres, and until that is done every method but those of `QuotaUpkeep` raises
`QuotaNotReadyError`. All methods raise `QuotaUnavailableError` when the server cannot be reached.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Protocol

from service_kit.ids import GenerationId, KeyId, TenantId
from state_store.tenants import QuotaLimits


class QuotaKind(StrEnum):
    """The fields of QuotaLimits."""

    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    MAX_CONCURRENT = "max_concurrent"
    TOKENS_PER_DAY = "tokens_per_day"
    TOKENS_PER_MONTH = "tokens_per_month"


class QuotaScope(StrEnum):
    """Whose limit."""

    TENANT = "tenant"
    KEY = "key"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaSubject:
    """Who is limited: a key and its tenant, each with limits of its own."""

    tenant_id: TenantId
    key_id: KeyId
    tenant_limits: QuotaLimits
    key_limits: QuotaLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaCharge:
    """What a generation may cost its tenant at most."""

    generation_id: GenerationId
    tenant_id: TenantId
    key_id: KeyId
    prompt_tokens: int
    max_output_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.max_output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaSettlement:
    """What an ended generation has cost: prompt and output."""

    generation_id: GenerationId
    tenant_id: TenantId
    key_id: KeyId
    used_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaStanding:
    """One limit and what is left of it. `reset` is how long until all of it is free again if nothing more is used; zero
    for concurrency, which time does not free."""

    scope: QuotaScope
    kind: QuotaKind
    limit: int
    remaining: int
    reset: timedelta


class QuotaPort(Protocol):
    """Reservations. Every change of one generation's reservation is idempotent."""

    async def look(self, subject: QuotaSubject) -> list[QuotaStanding]:
        """The standing of every limit that is set; changes nothing. Raises QuotaExceededError when the rate of requests
        or the concurrency leaves no place for another request."""

    async def reserve(self, charge: QuotaCharge, subject: QuotaSubject) -> list[QuotaStanding]:
        """Checks all limits, then charges all, atomically; returns the standing afterwards. Repeating it for a reservation
        that exists charges nothing. Raises QuotaExceededError, with when to come back, and charges nothing."""

    async def bind_many(self, charges: Sequence[QuotaCharge]) -> None:
        """Their generations are committed. A reservation that is gone is made again, without a check, as of when the
        generation was made; but not one that was settled before, which a late bind does not bring back."""

    async def release_many(self, charges: Sequence[QuotaCharge]) -> None:
        """Gives unbound reservations back whole: attached, in conflict, refused. Bound ones stay."""

    async def settle_many(self, items: Sequence[QuotaSettlement]) -> None:
        """Replaces the reserved tokens by the used ones, in the windows they were charged to, and frees the place among
        the concurrent ones. Without a reservation nothing is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastUse:
    """What a key had used when the counts were lost: requests and tokens by the second (last 60 s), tokens of today and of
    this month. Ended generations only: live ones come back as reservations."""

    tenant_id: TenantId
    key_id: KeyId
    by_second: tuple[tuple[datetime, int, int], ...]
    """(second, requests, tokens)"""
    day_tokens: int
    month_tokens: int


class QuotaUpkeep(Protocol):
    """What the reaper does."""

    async def is_ready(self) -> bool:
        """Whether the marker is there."""

    async def due_many(self, *, limit: int) -> list[GenerationId]:
        """Reservations to compare with Postgres: leases that ran out, and bound ones that were not looked at for a while.
        The caller then binds, releases (`drop_many`) or settles each; what it binds is due again later. Raises
        QuotaNotReadyError, as `drop_many` does."""

    async def drop_many(self, generation_ids: Sequence[GenerationId]) -> None:
        """Gives back reservations, bound or not, of generations that do not exist. Only those that are still due: what was
        bound since `due_many` has been committed since."""

    async def begin_rebuild(self) -> bool:
        """Takes the rebuild for this adapter and forgets what one that died has left; False when there is nothing to
        rebuild, or another adapter does it. It is lost again after a pause of some seconds."""

    async def rebuild(self, live: Sequence[QuotaCharge], past: Sequence[PastUse]) -> None:
        """Adds what Postgres knows to the counts; may be called page by page, with each live generation and each second
        once. Raises QuotaNotReadyError when the rebuild is not this adapter's any more."""

    async def mark_ready(self) -> None:
        """The caller has just rebuilt everything. Raises QuotaNotReadyError as `rebuild` does. The caller then binds all
        live generations: a bind may have been refused between the reading of Postgres and now."""


class PermissiveQuota:
    """Grants everything and counts nothing: for installations without quotas."""

    async def look(self, subject: QuotaSubject) -> list[QuotaStanding]:
        del subject
        return []

    async def reserve(self, charge: QuotaCharge, subject: QuotaSubject) -> list[QuotaStanding]:
        del charge, subject
        return []

    async def bind_many(self, charges: Sequence[QuotaCharge]) -> None:
        del charges

    async def release_many(self, charges: Sequence[QuotaCharge]) -> None:
        del charges

    async def settle_many(self, items: Sequence[QuotaSettlement]) -> None:
        del items
