"""What the quotas' keys hold, and what they should hold for given reservations and settlements."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgpack  # type: ignore[import-untyped]
from redis.asyncio import Redis

from service_kit.ids import GenerationId, KeyId, TenantId
from state_store.quota.port import QuotaKind
from state_store.quota.settings import QuotaSettings
from state_store.tenants import ApiKey
from tests.support.queue_keys import Contents, read_contents

SETTINGS = QuotaSettings()
KEPT_FOR_A_WHILE = ("requests:", "tokens:", "use:", "settled")
"""Names of keys that are left when nothing is live: each goes by itself."""
_WINDOW_S = 60
_DAY_S = 86_400
_OF_WINDOWS = {"total", "from", "newest"}


@dataclass(slots=True, kw_only=True)
class Charge:
    """What one generation counts; `used` is None while it is live."""

    tenant_id: TenantId
    key_id: KeyId
    tokens: int
    second: int
    due_ms: int
    is_bound: bool = False
    used: int | None = None

    @classmethod
    def of(cls, key: ApiKey, tokens: int, now: datetime) -> "Charge":
        """A new one, leased."""
        return cls(
            tenant_id=key.tenant.tenant_id,
            key_id=key.key_id,
            tokens=tokens,
            second=to_ms(now) // 1000,
            due_ms=to_ms(now + SETTINGS.lease),
        )

    @property
    def subjects(self) -> tuple[str, str]:
        return f"tenant:{self.tenant_id}", f"key:{self.key_id}"

    @property
    def counted(self) -> int:
        return self.tokens if self.used is None else self.used


@dataclass(frozen=True, slots=True, kw_only=True)
class Since:
    """The first seconds that count now."""

    window: int
    day: int
    month: int

    @classmethod
    def at(cls, now: datetime) -> "Since":
        second, day = to_ms(now) // 1000, now.replace(hour=0, minute=0, second=0, microsecond=0)
        first = day.replace(day=1)
        return cls(window=second - _WINDOW_S, day=to_ms(day) // 1000, month=to_ms(first) // 1000)


@dataclass
class QuotaBook:
    """Every charge that was ever made and not given back: a model that knows no script and adds up when it is asked."""

    charges: dict[GenerationId, Charge] = field(default_factory=dict)
    settled_until_ms: dict[GenerationId, int] = field(default_factory=dict)

    def live(self) -> dict[GenerationId, Charge]:
        return {name: charge for name, charge in self.charges.items() if charge.used is None}

    def bind(self, generation_id: GenerationId, now: datetime) -> None:
        charge = self.charges[generation_id]
        charge.is_bound, charge.due_ms = True, to_ms(now + SETTINGS.recheck)

    def settle(self, generation_id: GenerationId, used: int, now: datetime) -> None:
        if generation_id in self.charges:
            self.charges[generation_id].used = used
        self.settled_until_ms[generation_id] = to_ms(now + SETTINGS.settled_kept)

    def due(self, now: datetime) -> list[GenerationId]:
        return [name for name, charge in self.live().items() if charge.due_ms <= to_ms(now)]

    def has_place(self, key: ApiKey, *, tokens: int, now: datetime) -> bool:
        """Whether one more request of so many tokens keeps all limits."""
        limits_by_subject = {f"tenant:{key.tenant.tenant_id}": key.tenant.limits, f"key:{key.key_id}": key.limits}
        for subject, limits in limits_by_subject.items():
            used = self._used(subject, now)
            for kind, number in used.items():
                limit: int | None = getattr(limits, kind.value)
                ask = 1 if kind in (QuotaKind.REQUESTS_PER_MINUTE, QuotaKind.MAX_CONCURRENT) else tokens
                if limit is not None and number + ask > limit:
                    return False
        return True

    def _used(self, subject: str, now: datetime) -> dict[QuotaKind, int]:
        mine = [charge for charge in self.charges.values() if subject in charge.subjects]
        since = Since.at(now)
        return {
            QuotaKind.REQUESTS_PER_MINUTE: sum(charge.second >= since.window for charge in mine),
            QuotaKind.TOKENS_PER_MINUTE: sum(charge.counted for charge in mine if charge.second >= since.window),
            QuotaKind.MAX_CONCURRENT: sum(charge.used is None for charge in mine),
            QuotaKind.TOKENS_PER_DAY: sum(charge.counted for charge in mine if charge.second >= since.day),
            QuotaKind.TOKENS_PER_MONTH: sum(charge.counted for charge in mine if charge.second >= since.month),
        }

    def contents(self, now: datetime) -> Contents:
        """Of the keys of all shards, by name without hash tag."""
        contents: defaultdict[str, Any] = defaultdict(Counter)
        for name, charge in self.live().items():
            contents["reservations"][name] = [
                str(charge.tenant_id),
                str(charge.key_id),
                charge.tokens,
                charge.second,
                charge.is_bound,
            ]
            contents["checks"][name] = charge.due_ms
            for subject in charge.subjects:
                contents["concurrent"][subject] += 1
                contents["reserved"][subject] += charge.tokens
        contents["settled"].update({name: ms for name, ms in self.settled_until_ms.items() if ms > to_ms(now)})
        since = Since.at(now)
        for charge in self.charges.values():
            for subject in charge.subjects:
                if charge.second >= since.window:
                    contents[f"requests:{subject}"][str(charge.second)] += 1
                    contents[f"tokens:{subject}"][str(charge.second)] += charge.counted
                if charge.second >= since.day:
                    contents[f"use:{subject}"]["day_tokens"] += charge.counted
                if charge.second >= since.month:
                    contents[f"use:{subject}"]["month_tokens"] += charge.counted
        return {name: dict(members) for name, members in contents.items() if members}


async def read_quota_contents(client: Redis, *, now: datetime) -> Contents:
    """What counts now of the keys of all shards: without the bookkeeping of windows, whose total is compared here, and
    without what an adapter would take for gone. Asserts that no key is in two shards, and which ones go by themselves."""
    contents: Contents = {}
    for key in await client.keys("{quota:*"):
        name = key.decode().rpartition("}:")[2]
        if name == "marker":
            continue
        is_kept = (await client.pttl(key)) < 0
        assert is_kept is not name.startswith(KEPT_FOR_A_WHILE), name
        (members,) = (await read_contents(client, key.decode())).values()
        found = _counted(name, members, now)
        known = contents.setdefault(name, {})
        assert not known.keys() & found.keys()
        known |= found
    return {name: members for name, members in contents.items() if members}


def _counted(name: str, members: dict[str, Any], now: datetime) -> dict[str, Any]:
    if name == "reservations":
        return {generation: msgpack.unpackb(packed) for generation, packed in members.items()}
    if name == "settled":
        return {generation: ms for generation, ms in members.items() if ms > to_ms(now)}
    if name.startswith("use:"):
        current = {"day": Since.at(now).day // _DAY_S, "month": Since.at(now).month // _DAY_S}
        counts = {kind: members[f"{kind}_tokens"] for kind, number in current.items() if members[kind] == number}
        return {f"{kind}_tokens": number for kind, number in counts.items() if number}
    if name.startswith(("requests:", "tokens:")):
        seconds = {second: number for second, number in members.items() if second not in _OF_WINDOWS}
        assert members["total"] == sum(seconds.values()), name
        assert members["newest"] == max(map(int, seconds)), name
        assert members["from"] <= min(map(int, seconds)), name
        return {second: number for second, number in seconds.items() if int(second) >= Since.at(now).window}
    return members


def to_ms(time: datetime) -> int:
    return int(time.timestamp() * 1000)
