"""Ends on request: by the caller, by grace, by queue timeout or deadline."""

from collections.abc import Sequence

from scheduler.recovery import Recovery
from scheduler.session_registry import SessionRegistry
from service_kit.errors import NotFoundError
from service_kit.ids import GenerationId, TenantId
from state_store.model import CancelCause, GenerationRecord, State
from state_store.ports import GenerationStore


class Cancellation:
    """Records the wish first. A queued row is then ended here; a running one by its worker's last word."""

    def __init__(self, *, store: GenerationStore, registry: SessionRegistry, recovery: Recovery) -> None:
        self._store = store
        self._registry = registry
        self._recovery = recovery

    async def cancel(self, tenant_id: TenantId, generation_id: GenerationId) -> State:
        """The state afterwards. Idempotent. Raises NotFoundError for an unknown or another tenant's generation."""
        record = (await self._store.get_many([generation_id]))[0]
        if record is None or record.tenant_id != tenant_id:
            raise NotFoundError("no such generation")
        if record.state.is_terminal:
            return record.state
        await self.request([(generation_id, CancelCause.CLIENT)])
        after = (await self._store.get_many([generation_id]))[0]
        assert after is not None
        return after.state

    async def request(self, items: Sequence[tuple[GenerationId, CancelCause]]) -> None:
        """Records the causes and acts on them."""
        records = [record for record in await self._store.request_cancel_many(items) if record is not None]
        await self.act_on([record for record in records if record.cancel_cause is not None])

    async def act_on(self, records: Sequence[GenerationRecord]) -> None:
        """Ends the queued ones among rows that have a cause, and tells the workers of the running ones."""
        for record in records:
            if record.state is State.RUNNING:
                self._registry.cancel_attempt(record)
        await self._recovery.end_rows([record for record in records if record.state is State.QUEUED])
