"""Sums over the ledger in memory."""

from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC
from typing import assert_never

from state_store.memory.data import MemoryPart
from state_store.model import LedgerRow
from state_store.tenant_store import UsageDimension, UsageQuery, UsageRow


class MemoryUsage(MemoryPart):
    """UsageStore."""

    async def usage(self, query: UsageQuery) -> list[UsageRow]:
        groups: dict[tuple[str, ...], list[LedgerRow]] = defaultdict(list)
        if not query.group_by:
            groups[()] = []
        for row in self._data.ledger.values():
            if query.since <= row.finished_at < query.until and query.tenant_id in (None, row.tenant_id):
                groups[tuple(_value(row, dimension) for dimension in query.group_by)].append(row)
        return [_sum(group, groups[group]) for group in sorted(groups)]


def _sum(group: tuple[str, ...], rows: Sequence[LedgerRow]) -> UsageRow:
    return UsageRow(
        group=group,
        generations=len(rows),
        prompt_tokens=sum(row.prompt_tokens for row in rows),
        cached_prompt_tokens=sum(row.cached_prompt_tokens for row in rows),
        output_tokens=sum(row.output_tokens for row in rows),
    )


def _value(row: LedgerRow, dimension: UsageDimension) -> str:
    match dimension:
        case UsageDimension.TENANT:
            return row.tenant_id
        case UsageDimension.KEY:
            return row.key_id
        case UsageDimension.MODEL:
            return row.model
        case UsageDimension.CLASS:
            return row.priority_class.value
        case UsageDimension.STATE:
            return row.state.value
        case UsageDimension.DAY:
            return row.finished_at.astimezone(UTC).date().isoformat()
    assert_never(dimension)
