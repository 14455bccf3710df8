"""Sums over the ledger. The dimensions are names of this file, never text of a caller."""

from state_store.postgres.pool import PostgresPart
from state_store.tenant_store import UsageDimension, UsageQuery, UsageRow

_EXPRESSIONS = {
    UsageDimension.TENANT: "tenant_id",
    UsageDimension.KEY: "key_id",
    UsageDimension.MODEL: "model",
    UsageDimension.CLASS: "priority_class",
    UsageDimension.STATE: "state",
    UsageDimension.DAY: "to_char(finished_at AT TIME ZONE 'UTC', 'YYYY-MM-DD')",
}
_SUMS = """
SELECT :columns count(*) AS generations, coalesce(sum(prompt_tokens), 0)::bigint AS prompt_tokens,
    coalesce(sum(cached_prompt_tokens), 0)::bigint AS cached_prompt_tokens,
    coalesce(sum(output_tokens), 0)::bigint AS output_tokens
FROM usage_ledger WHERE :only finished_at >= %(since)s AND finished_at < %(until)s :group
"""


def statement(query: UsageQuery) -> str:
    """With the tenant and the dimensions of the query; the rest are parameters."""
    names = [f"group_{number}" for number in range(len(query.group_by))]
    columns = [f"{_EXPRESSIONS[dimension]} AS {name}, " for dimension, name in zip(query.group_by, names, strict=True)]
    only = "tenant_id = %(tenant_id)s AND" if query.tenant_id is not None else ""
    filled = _SUMS.replace(":columns", "".join(columns)).replace(":only", only)
    return filled.replace(":group", f"GROUP BY {', '.join(names)}" if names else "")


class PostgresUsage(PostgresPart):
    """UsageStore."""

    async def usage(self, query: UsageQuery) -> list[UsageRow]:
        parameters = {"tenant_id": query.tenant_id, "since": query.since, "until": query.until}
        found = [
            UsageRow(
                group=tuple(row[f"group_{number}"] for number in range(len(query.group_by))),
                generations=row["generations"],
                prompt_tokens=row["prompt_tokens"],
                cached_prompt_tokens=row["cached_prompt_tokens"],
                output_tokens=row["output_tokens"],
            )
            for row in await self._database.fetch(statement(query), parameters)
        ]
        return sorted(found, key=lambda row: row.group)
