"""Ends on request: by the caller, by grace, by queue timeout or deadline."""

from collections.abc import Sequence
from contextlib import aclosing

from scheduler.batcher import Batcher
from scheduler.cancel_hints import CancelHints
from scheduler.recovery import Recovery
from scheduler.session_registry import SessionRegistry
from service_kit.errors import NotFoundError, UnavailableError
from service_kit.ids import GenerationId, TenantId
from service_kit.logging import get_logger
from state_store.model import CancelCause, GenerationRecord, State
from state_store.ports import GenerationStore

_log = get_logger()


class Cancellation:
    """Records the wish first. A queued row is then ended here; a running one by its worker's last word."""

    def __init__(
        self, *, store: GenerationStore, registry: SessionRegistry, recovery: Recovery, hints: CancelHints
    ) -> None:
        self._store = store
        self._registry = registry
        self._recovery = recovery
        self._hints = hints
        self._cancels: Batcher[tuple[TenantId, GenerationId], State | None] = Batcher(self._cancel_batch)

    async def cancel(self, tenant_id: TenantId, generation_id: GenerationId) -> State:
        """The state afterwards. Idempotent. Raises NotFoundError for an unknown or another tenant's generation."""
        state = await self._cancels.submit((tenant_id, generation_id))
        if state is None:
            raise NotFoundError("no such generation")
        return state

    async def _cancel_batch(self, items: Sequence[tuple[TenantId, GenerationId]]) -> list[State | None]:
        """Callers that cancel at once share their transactions: one by one they would wait for each other's row locks
        and use up the connections that the streams' ends need."""
        records = await self._store.get_many([generation_id for _, generation_id in items])
        states = {
            item: record.state
            for item, record in zip(items, records, strict=True)
            if record is not None and record.tenant_id == item[0]
        }
        live = [item for item, state in states.items() if not state.is_terminal]
        if live:
            await self.request([(generation_id, CancelCause.CLIENT) for _, generation_id in live])
            after = await self._store.get_many([generation_id for _, generation_id in live])
            states |= {item: record.state for item, record in zip(live, after, strict=True) if record is not None}
        return [states.get(item) for item in items]

    async def request(self, items: Sequence[tuple[GenerationId, CancelCause]]) -> None:
        """Records the causes and acts on them."""
        records = [record for record in await self._store.request_cancel_many(items) if record is not None]
        await self.act_on([record for record in records if record.cancel_cause is not None])

    async def act_on(self, records: Sequence[GenerationRecord]) -> None:
        """Ends the queued ones among rows that have a cause, and tells the workers of the running ones, or their schedulers."""
        running = [record for record in records if record.state is State.RUNNING]
        elsewhere = [record.generation_id for record in running if not self._registry.cancel_attempt(record)]
        await self._tell_others(elsewhere)
        await self._recovery.end_rows([record for record in records if record.state is State.QUEUED])

    async def _tell_others(self, generation_ids: Sequence[GenerationId]) -> None:
        if not generation_ids:
            return
        try:
            await self._hints.publish(generation_ids)
        except UnavailableError as error:
            _log.warning("cancel_hint_lost", reason=error.reason, count=len(generation_ids))

    async def follow_hints(self) -> None:
        """Passes on to workers served here what other schedulers cancelled, until cancelled. Of a hint that cannot be
        looked into the next comparison takes care."""
        async with aclosing(self._hints.follow()) as hints:
            async for generation_ids in hints:
                try:
                    records = await self._store.get_many(generation_ids)
                except UnavailableError as error:
                    _log.warning("cancel_hint_lost", reason=error.reason, count=len(generation_ids))
                    continue
                for record in records:
                    if record is not None and record.state is State.RUNNING and record.cancel_cause is not None:
                        self._registry.cancel_attempt(record)
