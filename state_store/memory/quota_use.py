"""What counts against quotas, in memory."""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta

from service_kit.ids import GenerationId, KeyId, TenantId, minted_at
from state_store.memory.data import MemoryPart
from state_store.model import GenerationRecord
from state_store.quota.port import PastUse, QuotaCharge
from state_store.quota.records import QuotaRecord, QuotaUse

_MINUTE = timedelta(seconds=61)


class MemoryQuotaUse(MemoryPart):
    """QuotaRecords."""

    async def quota_records(self, generation_ids: Sequence[GenerationId]) -> list[QuotaRecord | None]:
        return [
            QuotaRecord(charge=_charge(record), used_tokens=_used(record) if record.state.is_terminal else None)
            if (record := self._data.generations.get(generation_id)) is not None
            else None
            for generation_id in generation_ids
        ]

    async def live_charges_page(self, *, after: GenerationId | None, limit: int) -> list[QuotaCharge]:
        return [_charge(record) for record in self._page(after) if not record.state.is_terminal][:limit]

    async def quota_use(self, *, now: datetime | None = None) -> QuotaUse:
        at = self._at(now)
        today = at.replace(hour=0, minute=0, second=0, microsecond=0)
        days: Counter[tuple[TenantId, KeyId]] = Counter()
        months: Counter[tuple[TenantId, KeyId]] = Counter()
        seconds: dict[tuple[TenantId, KeyId], dict[datetime, tuple[int, int]]] = {}
        for row in self._data.ledger.values():
            owner, made = (row.tenant_id, row.key_id), minted_at(row.generation_id)
            if made >= today.replace(day=1):
                months[owner] += row.prompt_tokens + row.output_tokens
                days[owner] += row.prompt_tokens + row.output_tokens if made >= today else 0
        for record in self._by_id():
            if record.state.is_terminal and minted_at(record.generation_id) >= at - _MINUTE:
                of_owner = seconds.setdefault((record.tenant_id, record.key_id), {})
                second = record.created_at.replace(microsecond=0)
                requests, tokens = of_owner.get(second, (0, 0))
                of_owner[second] = (requests + 1, tokens + _used(record))
        past = [
            PastUse(
                tenant_id=owner[0],
                key_id=owner[1],
                by_second=tuple((second, *counts) for second, counts in sorted(seconds.get(owner, {}).items())),
                day_tokens=days[owner],
                month_tokens=months[owner],
            )
            for owner in sorted(months.keys() | seconds.keys())
        ]
        return QuotaUse(
            live=tuple(await self.live_charges_page(after=None, limit=len(self._data.generations))), past=tuple(past)
        )


def _charge(record: GenerationRecord) -> QuotaCharge:
    return QuotaCharge(
        generation_id=record.generation_id,
        tenant_id=record.tenant_id,
        key_id=record.key_id,
        prompt_tokens=record.num_prompt_tokens,
        max_output_tokens=record.sampling.max_output_tokens,
    )


def _used(record: GenerationRecord) -> int:
    return record.num_prompt_tokens + record.output_tokens
