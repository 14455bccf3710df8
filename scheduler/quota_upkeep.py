"""Keeps the quotas' counts true to Postgres: compares reservations with rows, and rebuilds counts that were lost.

Nothing here takes a reservation for abandoned because of its age alone. The row decides: a live one keeps its reservation,
a final one has its use counted, and only what was never committed is given back.
"""

from collections.abc import Sequence

from service_kit.ids import GenerationId
from service_kit.logging import get_logger
from state_store.quota.errors import QuotaNotReadyError
from state_store.quota.port import QuotaCharge, QuotaPort, QuotaSettlement, QuotaUpkeep
from state_store.quota.records import QuotaRecord, QuotaRecords

_log = get_logger()

PAGE = 500
MAX_PAGES = 20
"""Of one round; what is due beyond them waits for the next second."""


class QuotaReaper:
    """`run_once` every second. May run on several schedulers at once: every step is idempotent but for the rebuild, which
    belongs to one of them."""

    def __init__(self, *, quota: QuotaPort, upkeep: QuotaUpkeep, records: QuotaRecords) -> None:
        self._quota = quota
        self._upkeep = upkeep
        self._records = records

    async def run_once(self) -> None:
        """Raises UnavailableError when a store cannot be reached; the next round begins where the stores stand."""
        if await self._upkeep.is_ready():
            await self.compare_due()
        else:
            await self.rebuild()

    async def compare_due(self) -> None:
        """Reservations whose lease ran out, and bound ones that were not looked at for a while."""
        for _ in range(MAX_PAGES):
            due = await self._upkeep.due_many(limit=PAGE)
            if due:
                await self._compare(due)
            if len(due) < PAGE:
                return

    async def _compare(self, due: Sequence[GenerationId]) -> None:
        found = await self._records.quota_records(due)
        records = [record for record in found if record is not None]
        absent = [generation_id for generation_id, record in zip(due, found, strict=True) if record is None]
        if absent:
            _log.warning("reservations_given_back", count=len(absent))
            await self._upkeep.drop_many(absent)
        await self._quota.bind_many([record.charge for record in records if record.used_tokens is None])
        await self._quota.settle_many([_settlement(record) for record in records if record.used_tokens is not None])

    async def bind_rows(self, generation_ids: Sequence[GenerationId]) -> None:
        """For rows that nobody has bound: their scheduler died between commit and bind, or an operator made them. Raises
        UnavailableError, but not while the counts are rebuilt: that begins with the rows and ends with a bind of all."""
        found = await self._records.quota_records(generation_ids)
        live = [record.charge for record in found if record is not None and record.used_tokens is None]
        try:
            await self._quota.bind_many(live)
        except QuotaNotReadyError:
            return

    async def rebuild(self) -> None:
        """Fills emptied counts from Postgres, then lets them serve.

        Postgres is read before the rebuild is taken, because that may be slow. What changed since the reading: ends are
        settled when their reservations fall due, and generations whose bind was refused meanwhile are bound at the end.
        """
        use = await self._records.quota_use()
        if not await self._upkeep.begin_rebuild():
            return
        try:
            for start in range(0, len(use.live), PAGE):
                await self._upkeep.rebuild(use.live[start : start + PAGE], ())
            for start in range(0, len(use.past), PAGE):
                await self._upkeep.rebuild((), use.past[start : start + PAGE])
            await self._upkeep.mark_ready()
        except QuotaNotReadyError:
            _log.info("quota_rebuild_lost")
            return
        _log.info("quotas_rebuilt", live=len(use.live), keys=len(use.past))
        await self._bind_live()

    async def _bind_live(self) -> None:
        after: GenerationId | None = None
        while page := await self._live_page(after):
            await self._quota.bind_many(page)
            after = page[-1].generation_id

    async def _live_page(self, after: GenerationId | None) -> list[QuotaCharge]:
        return await self._records.live_charges_page(after=after, limit=PAGE)


def _settlement(record: QuotaRecord) -> QuotaSettlement:
    return QuotaSettlement(
        generation_id=record.charge.generation_id,
        tenant_id=record.charge.tenant_id,
        key_id=record.charge.key_id,
        used_tokens=record.used_tokens or 0,
    )
