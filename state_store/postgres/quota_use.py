"""What counts against quotas, in Postgres.

The past of a month is summed day by day, so that no statement reads more than a day of the ledger. These sums take only what
ended a while ago, which no transaction adds to any more; live generations and what ended since come from one statement, and
so from one snapshot. That way nothing is counted twice or left out, although many statements are needed. What was used stands in the ledger: the
prompt of an ended generation may have been deleted.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from uuid import UUID

from service_kit.ids import GenerationId, KeyId, TenantId
from state_store.postgres import rows
from state_store.postgres.attempts import known_ids
from state_store.postgres.pool import PostgresPart
from state_store.quota.port import PastUse, QuotaCharge
from state_store.quota.records import QuotaRecord, QuotaUse

_LOWEST_ID = "00000000-0000-0000-0000-000000000000"
_UNSETTLED = timedelta(seconds=30)
"""Longer than any transaction may take (PoolSettings.transaction_timeout): what ended before is committed."""
_MINUTE = timedelta(seconds=61)
_DAY = timedelta(days=1)

_CHARGE = """
    g.generation_id, g.tenant_id, g.key_id, octet_length(g.prompt_token_ids) / 4 AS prompt_tokens,
    (g.sampling ->> 'max_output_tokens')::bigint AS max_output_tokens
"""
_AT = "SELECT coalesce(%(now)s::timestamptz, now()) AS at"
_RECORDS = f"""
SELECT {_CHARGE}, l.prompt_tokens + l.output_tokens AS used_tokens
FROM generations g LEFT JOIN usage_ledger l ON l.generation_id = g.generation_id
WHERE g.generation_id = ANY(%(generation_ids)s::uuid[])
"""  # noqa: S608 - constants of this file
_LIVE_PAGE = f"""
SELECT {_CHARGE} FROM generations g WHERE g.state = 'QUEUED' AND g.generation_id > %(after)s::uuid
UNION ALL
SELECT {_CHARGE} FROM generations g WHERE g.state = 'RUNNING' AND g.generation_id > %(after)s::uuid
ORDER BY generation_id LIMIT %(limit)s
"""  # noqa: S608 - constants of this file
_SUM_OF_DAY = """
SELECT tenant_id, key_id, sum(prompt_tokens + output_tokens)::bigint AS tokens FROM usage_ledger
WHERE generation_id >= %(first)s::uuid AND generation_id < %(end)s::uuid AND finished_at < %(settled_before)s
GROUP BY tenant_id, key_id
"""
_NOW = f"""
SELECT 'live' AS kind, {_CHARGE}, NULL::timestamptz AS second FROM generations g WHERE g.state = 'QUEUED'
UNION ALL
SELECT 'live', {_CHARGE}, NULL FROM generations g WHERE g.state = 'RUNNING'
UNION ALL
SELECT 'second', NULL, l.tenant_id, l.key_id, count(*), sum(l.prompt_tokens + l.output_tokens)::bigint,
    date_trunc('second', g.created_at, 'UTC')
FROM usage_ledger l JOIN generations g ON g.generation_id = l.generation_id
WHERE l.generation_id >= %(minute)s::uuid AND g.generation_id >= %(minute)s::uuid GROUP BY 3, 4, 7
UNION ALL
SELECT 'day', NULL, tenant_id, key_id, count(*), sum(prompt_tokens + output_tokens)::bigint, NULL
FROM usage_ledger WHERE finished_at >= %(settled_before)s AND generation_id >= %(day)s::uuid GROUP BY 3, 4
UNION ALL
SELECT 'month', NULL, tenant_id, key_id, count(*), sum(prompt_tokens + output_tokens)::bigint, NULL
FROM usage_ledger WHERE finished_at >= %(settled_before)s AND generation_id >= %(month)s::uuid GROUP BY 3, 4
"""  # noqa: S608 - constants of this file

_Owner = tuple[TenantId, KeyId]


class PostgresQuotaUse(PostgresPart):
    """QuotaRecords."""

    async def quota_records(self, generation_ids: Sequence[GenerationId]) -> list[QuotaRecord | None]:
        found = await self._database.fetch(_RECORDS, {"generation_ids": known_ids(generation_ids)})
        records = {
            str(row["generation_id"]): QuotaRecord(charge=_charge(row), used_tokens=row["used_tokens"]) for row in found
        }
        return [records.get(generation_id) for generation_id in generation_ids]

    async def live_charges_page(self, *, after: GenerationId | None, limit: int) -> list[QuotaCharge]:
        found = await self._database.fetch(_LIVE_PAGE, {"after": after or _LOWEST_ID, "limit": limit})
        return [_charge(row) for row in found]

    async def quota_use(self, *, now: datetime | None = None) -> QuotaUse:
        (row,) = await self._database.fetch(_AT, {"now": now})
        at: datetime = row["at"]
        past = _Past(at)
        for first in past.days():
            parameters = {"first": _id_at(first), "end": _id_at(first + _DAY), "settled_before": at - _UNSETTLED}
            for row in await self._database.fetch(_SUM_OF_DAY, parameters):
                past.add_tokens(row, is_today=first == past.today)
        parameters = {
            "minute": _id_at(at - _MINUTE),
            "day": _id_at(past.today),
            "month": _id_at(past.month),
            "settled_before": at - _UNSETTLED,
        }
        live: list[QuotaCharge] = []
        for row in await self._database.fetch(_NOW, parameters):
            if row["kind"] == "live":
                live.append(_charge(row))
            else:
                past.add(row)
        return QuotaUse(live=tuple(live), past=past.uses())


class _Past:
    """Adds up what the statements answer, by key."""

    def __init__(self, at: datetime) -> None:
        self.today = at.replace(hour=0, minute=0, second=0, microsecond=0)
        self.month = self.today.replace(day=1)
        self._day_tokens: Counter[_Owner] = Counter()
        self._month_tokens: Counter[_Owner] = Counter()
        self._seconds: dict[_Owner, list[tuple[datetime, int, int]]] = {}

    def days(self) -> Iterator[datetime]:
        day = self.month
        while day <= self.today:
            yield day
            day += _DAY

    def add_tokens(self, row: rows.Row, *, is_today: bool) -> None:
        owner = (row["tenant_id"], row["key_id"])
        self._month_tokens[owner] += row["tokens"]
        self._day_tokens[owner] += row["tokens"] if is_today else 0

    def add(self, row: rows.Row) -> None:
        """A row of `_NOW`, whose columns are called as those of a charge."""
        owner, requests, tokens = (row["tenant_id"], row["key_id"]), row["prompt_tokens"], row["max_output_tokens"]
        match row["kind"]:
            case "second":
                self._seconds.setdefault(owner, []).append((row["second"], requests, tokens))
            case "day":
                self._day_tokens[owner] += tokens
            case "month":
                self._month_tokens[owner] += tokens

    def uses(self) -> tuple[PastUse, ...]:
        return tuple(
            PastUse(
                tenant_id=owner[0],
                key_id=owner[1],
                by_second=tuple(sorted(self._seconds.get(owner, []))),
                day_tokens=self._day_tokens[owner],
                month_tokens=self._month_tokens[owner],
            )
            for owner in sorted(self._month_tokens.keys() | self._seconds.keys())
        )


def _id_at(at: datetime) -> str:
    """The lowest id that a generation made then can have (RFC 9562: the first 48 bits are milliseconds)."""
    return str(UUID(int=(int(at.timestamp() * 1000)) << 80))


def _charge(row: rows.Row) -> QuotaCharge:
    return QuotaCharge(
        generation_id=GenerationId(str(row["generation_id"])),
        tenant_id=row["tenant_id"],
        key_id=row["key_id"],
        prompt_tokens=row["prompt_tokens"],
        max_output_tokens=row["max_output_tokens"],
    )
