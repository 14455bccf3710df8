"""Quotas in memory: the model that the scripts are compared with, and what tests run over.

Counts are kept without end and summed when they are asked for.
"""

import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta

from service_kit.ids import GenerationId, KeyId, TenantId, minted_at
from state_store.quota.errors import QuotaNotReadyError
from state_store.quota.measure import LIVE_RETRY, WINDOW_S, Measure, is_limited, limits_of, refusal_of, standing_of
from state_store.quota.port import (
    PastUse,
    QuotaCharge,
    QuotaKind,
    QuotaScope,
    QuotaSettlement,
    QuotaStanding,
    QuotaSubject,
)
from state_store.quota.settings import QuotaSettings

_SECOND = timedelta(seconds=1)
_DAY = timedelta(days=1)
_Owner = TenantId | KeyId


@dataclass(slots=True, kw_only=True)
class _Reservation:
    owners: tuple[tuple[QuotaScope, _Owner], ...]
    second: datetime
    tokens: int
    is_bound: bool
    due_at: datetime


@dataclass(slots=True, kw_only=True)
class MemoryQuotaData:
    """What several adapters share, as they would share a server."""

    is_ready: bool = False
    reservations: dict[GenerationId, _Reservation] = field(default_factory=dict)
    settled: dict[GenerationId, datetime] = field(default_factory=dict)
    """Until when the settlement is remembered."""
    requests: Counter[tuple[QuotaScope, _Owner, datetime]] = field(default_factory=Counter)
    tokens: Counter[tuple[QuotaScope, _Owner, datetime]] = field(default_factory=Counter)
    day_tokens: Counter[tuple[QuotaScope, _Owner, date]] = field(default_factory=Counter)
    month_tokens: Counter[tuple[QuotaScope, _Owner, date]] = field(default_factory=Counter)
    rebuild: tuple[str, datetime] | None = None
    """Who rebuilds, and until when it is his without another call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asks:
    requests: int
    tokens: int


_NOTHING = _Asks(requests=0, tokens=0)


class MemoryQuota:
    """`QuotaPort` and `QuotaUpkeep`. No method awaits anything, so each call is atomic within the event loop."""

    def __init__(
        self,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        settings: QuotaSettings | None = None,
        *,
        data: MemoryQuotaData | None = None,
    ) -> None:
        self._clock = clock
        self._settings = settings or QuotaSettings()
        self._data = data or MemoryQuotaData()
        self._token = uuid.uuid4().hex

    def lose_all(self) -> None:
        """What FLUSHALL does."""
        empty = MemoryQuotaData()
        for name in MemoryQuotaData.__slots__:
            setattr(self._data, name, getattr(empty, name))

    def has_reservations(self) -> bool:
        return bool(self._data.reservations)

    async def look(self, subject: QuotaSubject) -> list[QuotaStanding]:
        if not is_limited(subject):
            return []
        self._check_ready()
        return self._judge(subject, _Asks(requests=1, tokens=0))

    async def reserve(self, charge: QuotaCharge, subject: QuotaSubject) -> list[QuotaStanding]:
        self._check_ready()
        if charge.generation_id not in self._data.reservations:
            self._judge(subject, _Asks(requests=1, tokens=charge.tokens))
            self._take(charge, self._second(), is_bound=False, due_in=self._settings.lease)
        return standing_of(self._measure(subject, _NOTHING))

    def _judge(self, subject: QuotaSubject, asks: _Asks) -> list[QuotaStanding]:
        measures = self._measure(subject, asks)
        if any(measure.wait is not None for measure in measures):
            raise refusal_of(subject, measures)
        return standing_of(measures)

    async def bind_many(self, charges: Sequence[QuotaCharge]) -> None:
        self._check_ready()
        for charge in charges:
            reservation = self._data.reservations.get(charge.generation_id)
            if reservation is not None:
                reservation.is_bound = True
                reservation.due_at = self._clock() + self._settings.recheck
            elif not self._was_settled(charge.generation_id):
                self._take(charge, self._made(charge), is_bound=True, due_in=self._settings.recheck)

    async def release_many(self, charges: Sequence[QuotaCharge]) -> None:
        self._check_ready()
        for charge in charges:
            reservation = self._data.reservations.get(charge.generation_id)
            if reservation is not None and not reservation.is_bound:
                self._give_back(charge.generation_id)

    async def settle_many(self, items: Sequence[QuotaSettlement]) -> None:
        self._check_ready()
        for item in items:
            reservation = self._data.reservations.pop(item.generation_id, None)
            if reservation is not None:
                self._count(reservation.owners, reservation.second, 0, item.used_tokens - reservation.tokens)
            self._data.settled[item.generation_id] = self._clock() + self._settings.settled_kept

    async def is_ready(self) -> bool:
        return self._data.is_ready

    async def due_many(self, *, limit: int) -> list[GenerationId]:
        self._check_ready()
        now = self._clock()
        due = [(each.due_at, name) for name, each in self._data.reservations.items() if each.due_at <= now]
        return [name for _, name in sorted(due)[:limit]]

    async def drop_many(self, generation_ids: Sequence[GenerationId]) -> None:
        self._check_ready()
        for generation_id in generation_ids:
            reservation = self._data.reservations.get(generation_id)
            if reservation is not None and reservation.due_at <= self._clock():
                self._give_back(generation_id)

    async def begin_rebuild(self) -> bool:
        if self._data.is_ready:
            return False
        if self._data.rebuild is not None:
            owner, until = self._data.rebuild
            if owner != self._token and until > self._clock():
                return False
        self.lose_all()
        self._data.rebuild = (self._token, self._clock() + self._settings.rebuild_hold)
        return True

    async def rebuild(self, live: Sequence[QuotaCharge], past: Sequence[PastUse]) -> None:
        self._check_rebuilding()
        self._data.rebuild = (self._token, self._clock() + self._settings.rebuild_hold)
        for charge in live:
            if charge.generation_id not in self._data.reservations:
                self._take(charge, self._made(charge), is_bound=True, due_in=self._settings.lease)
        today = self._second().date()
        for use in past:
            for scope, owner in _owners(use.tenant_id, use.key_id):
                self._data.day_tokens[scope, owner, today] += use.day_tokens
                self._data.month_tokens[scope, owner, today.replace(day=1)] += use.month_tokens
                for second, requests, tokens in use.by_second:
                    self._data.requests[scope, owner, _floor(second)] += requests
                    self._data.tokens[scope, owner, _floor(second)] += tokens

    async def mark_ready(self) -> None:
        self._check_rebuilding()
        self._data.rebuild = None
        self._data.is_ready = True

    def _check_rebuilding(self) -> None:
        owner, until = self._data.rebuild or ("", self._clock())
        if self._data.is_ready or owner != self._token or until <= self._clock():
            raise QuotaNotReadyError("the rebuild of the quotas is not this process's any more")

    def _check_ready(self) -> None:
        if not self._data.is_ready:
            raise QuotaNotReadyError("the quotas were emptied and are not rebuilt yet")

    def _was_settled(self, generation_id: GenerationId) -> bool:
        until = self._data.settled.get(generation_id)
        return until is not None and until > self._clock()

    def _second(self) -> datetime:
        return _floor(self._clock())

    def _made(self, charge: QuotaCharge) -> datetime:
        return min(_floor(minted_at(charge.generation_id)), self._second())

    def _take(self, charge: QuotaCharge, second: datetime, *, is_bound: bool, due_in: timedelta) -> None:
        reservation = _Reservation(
            owners=_owners(charge.tenant_id, charge.key_id),
            second=second,
            tokens=charge.tokens,
            is_bound=is_bound,
            due_at=self._clock() + due_in,
        )
        self._data.reservations[charge.generation_id] = reservation
        self._count(reservation.owners, second, 1, charge.tokens)

    def _give_back(self, generation_id: GenerationId) -> None:
        reservation = self._data.reservations.pop(generation_id)
        self._count(reservation.owners, reservation.second, -1, -reservation.tokens)

    def _count(self, owners: Iterable[tuple[QuotaScope, _Owner]], second: datetime, requests: int, tokens: int) -> None:
        day = second.date()
        for scope, owner in owners:
            self._data.requests[scope, owner, second] += requests
            self._data.tokens[scope, owner, second] += tokens
            self._data.day_tokens[scope, owner, day] += tokens
            self._data.month_tokens[scope, owner, day.replace(day=1)] += tokens

    def _measure(self, subject: QuotaSubject, asks: _Asks) -> list[Measure]:
        owners = dict(_owners(subject.tenant_id, subject.key_id))
        return [
            self._measure_one(scope, owners[scope], kind, limit, asks)
            for scope, kind, limit in limits_of(subject)
            if limit is not None
        ]

    def _measure_one(self, scope: QuotaScope, owner: _Owner, kind: QuotaKind, limit: int, asks: _Asks) -> Measure:
        now, today = self._clock(), self._second().date()
        frees_last = (WINDOW_S + 1) * _SECOND - (now - self._second())
        live = [each for each in self._data.reservations.values() if (scope, owner) in each.owners]
        frees: list[tuple[timedelta, int]]
        match kind:
            case QuotaKind.MAX_CONCURRENT:
                frees_last = LIVE_RETRY
                frees = [(frees_last, len(live))]
            case QuotaKind.TOKENS_PER_DAY:
                frees_last = _midnight(today + _DAY) - now
                frees = [(frees_last, self._data.day_tokens[scope, owner, today])]
            case QuotaKind.TOKENS_PER_MONTH:
                first = today.replace(day=1)
                frees_last = _midnight(_next_month(first)) - now
                frees = [(frees_last, self._data.month_tokens[scope, owner, first])]
            case QuotaKind.REQUESTS_PER_MINUTE:
                frees = self._window(self._data.requests, scope, owner)
            case QuotaKind.TOKENS_PER_MINUTE:
                frees = self._window(self._data.tokens, scope, owner)
        is_of_requests = kind in (QuotaKind.REQUESTS_PER_MINUTE, QuotaKind.MAX_CONCURRENT)
        ask = asks.requests if is_of_requests else asks.tokens
        used = sum(number for _, number in frees)
        wait = None
        if ask and used + ask > limit:
            is_of_tokens_over_days = kind in (QuotaKind.TOKENS_PER_DAY, QuotaKind.TOKENS_PER_MONTH)
            if is_of_tokens_over_days and used - sum(each.tokens for each in live) + ask <= limit:
                wait = LIVE_RETRY
            else:
                wait = _wait(frees, used + ask - limit, never=frees_last)
        latest = max((in_ for in_, number in frees if number), default=timedelta(0))
        reset = timedelta(0) if kind is QuotaKind.MAX_CONCURRENT else latest
        return Measure(scope=scope, kind=kind, limit=limit, used=used, reset=reset, wait=wait)

    def _window(
        self, counts: Counter[tuple[QuotaScope, _Owner, datetime]], scope: QuotaScope, owner: _Owner
    ) -> list[tuple[timedelta, int]]:
        """In how long which part of the last minute's count is free again, the oldest first."""
        now, first = self._clock(), self._second() - WINDOW_S * _SECOND
        return [
            (second + (WINDOW_S + 1) * _SECOND - now, number)
            for (of_scope, of_owner, second), number in sorted(counts.items())
            if (of_scope, of_owner) == (scope, owner) and second >= first and number
        ]


def _wait(frees: Sequence[tuple[timedelta, int]], excess: int, *, never: timedelta) -> timedelta:
    """In how long the parts that make up the excess are free; `never` when all of them are less."""
    for in_, number in frees:
        excess -= number
        if excess <= 0:
            return in_
    return never


def _owners(tenant_id: TenantId, key_id: KeyId) -> tuple[tuple[QuotaScope, _Owner], ...]:
    return (QuotaScope.TENANT, tenant_id), (QuotaScope.KEY, key_id)


def _floor(at: datetime) -> datetime:
    return at.replace(microsecond=0)


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)


def _next_month(first: date) -> date:
    return (first + 31 * _DAY).replace(day=1)
