"""Questions of operators, over all tenants."""

from datetime import UTC, datetime

from service_kit.ids import SessionId
from state_store.model import GenerationSummary, ModelKey, PriorityClass
from state_store.overview_store import GenerationFilter, QueuedRows
from state_store.postgres import rows, statements
from state_store.postgres.partitions import lowest_id
from state_store.postgres.pool import PostgresPart

_EVER = datetime(1970, 1, 1, tzinfo=UTC)

RUNNING_BY_SESSION = """
SELECT g.session_id, count(*) AS running FROM generations g WHERE g.state = 'RUNNING' GROUP BY g.session_id
"""
QUEUED_ROWS = """
SELECT g.model, g.model_revision, g.model_precision, g.priority_class, count(*) AS count, min(g.queued_at) AS oldest_at,
    sum(octet_length(g.prompt_token_ids) / 4)::bigint AS prompt_tokens
FROM generations g WHERE g.state = 'QUEUED'
GROUP BY g.model, g.model_revision, g.model_precision, g.priority_class
"""


class PostgresOverview(PostgresPart):
    """OverviewStore."""

    async def find_generations(self, wanted: GenerationFilter, *, limit: int) -> list[GenerationSummary]:
        parameters = {
            "since": lowest_id(wanted.since or _EVER),
            "tenant_id": wanted.tenant_id,
            "all_states": not wanted.states,
            "states": [state.value for state in wanted.states],
            "model": wanted.model,
            "priority_class": wanted.priority_class.value if wanted.priority_class is not None else None,
            "limit": limit,
        }
        return [rows.summary(row) for row in await self._database.fetch(statements.FIND_GENERATIONS, parameters)]

    async def running_by_session(self) -> dict[SessionId, int]:
        found = await self._database.fetch(RUNNING_BY_SESSION, {})
        return {SessionId(row["session_id"]): row["running"] for row in found}

    async def queued_rows(self) -> list[QueuedRows]:
        found = [
            QueuedRows(
                model=row["model"],
                model_key=ModelKey(revision=row["model_revision"], precision=row["model_precision"]),
                priority_class=PriorityClass(row["priority_class"]),
                count=row["count"],
                prompt_tokens=row["prompt_tokens"],
                oldest_at=row["oldest_at"],
            )
            for row in await self._database.fetch(QUEUED_ROWS, {})
        ]
        return sorted(found, key=lambda row: (row.model, row.model_key.revision, row.priority_class.rank))
