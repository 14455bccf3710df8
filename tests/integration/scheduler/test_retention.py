"""The loop that deletes what is kept only for a time, over memory twins and real servers."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest

from scheduler.retention import Retention, RetentionSettings
from service_kit.delta import Cursor
from service_kit.errors import UnavailableError
from service_kit.ids import GatewayId, GenerationId
from state_store.delta_log.port import AppendItem, LogEnd, OpenItem, SealItem
from state_store.model import GenerationRecord
from tests.support.delta_logs import delta_after
from tests.support.generations import LEASE, finish_of, granted, new_session, submitted
from tests.support.scheduler_rig import Stores

GATEWAY = GatewayId("gw")
SETTINGS = RetentionSettings(
    log_kept=timedelta(seconds=60), shortest_kept=timedelta(seconds=2), sessions_kept=timedelta(seconds=60)
)


class Looped:
    """Retention over `stores`, at a time that is `after_s` behind the present."""

    def __init__(self, stores: Stores) -> None:
        self.stores = stores
        self.after = timedelta(0)
        self.closed: list[GenerationId] = []
        self.retention = Retention(
            store=stores.store,  # type: ignore[arg-type]
            log=stores.log,
            close_logs=self._close,
            now=lambda: datetime.now(UTC) + self.after,
            settings=SETTINGS,
        )

    async def _close(self, records: Sequence[GenerationRecord]) -> None:
        self.closed += [record.generation_id for record in records]
        await self.stores.log.seal_many(
            [SealItem(generation_id=r.generation_id, attempt=r.attempt, terminal=LogEnd.of(r)) for r in records]
        )

    async def run(self, *, after_s: float) -> None:
        self.after = timedelta(seconds=after_s)
        await self.retention.run_once()

    async def ended(self, *, is_sealed: bool = True, **fields: object) -> GenerationRecord:
        """With a log and three tokens."""
        store, log = self.stores.store, self.stores.log
        session = new_session()
        await store.open_session(session, lease=LEASE)
        record = await granted(store, await submitted(store, **fields), session.session_id)  # type: ignore[arg-type]
        output = delta_after(Cursor(), 1, 2, 3)
        await log.open_many([OpenItem(generation_id=record.generation_id, attempt=1)])
        await log.append_many([AppendItem(generation_id=record.generation_id, attempt=1, delta=output)])
        [result] = await store.finish_many([finish_of(record, output=output, output_tokens=3)])
        assert result.record is not None
        if is_sealed:
            await self._close([result.record])
            self.closed.clear()
        return result.record

    async def has_texts(self, record: GenerationRecord) -> tuple[bool, bool, bool]:
        """Log, stored output, prompt."""
        [view] = await self.stores.log.read_many([(record.generation_id, 0)])
        [output] = await self.stores.store.read_output_many([record.generation_id])
        [row] = await self.stores.store.get_many([record.generation_id])
        assert row is not None
        return view.is_present, output is not None, bool(row.prompt_token_ids)


ALL, NONE = (True, True, True), (False, False, False)


@pytest.fixture
def looped(stores: Stores) -> Looped:
    return Looped(stores)


async def test_texts_that_were_not_to_be_stored_go_from_log_and_record_when_the_grace_is_over(looped: Looped) -> None:
    stored = await looped.ended(grace=timedelta(seconds=10))
    short = await looped.ended(grace=timedelta(seconds=10), is_stored=False)
    unlimited = await looped.ended(grace=None, is_stored=False)
    await looped.run(after_s=8)
    assert await looped.has_texts(short) == ALL
    await looped.run(after_s=12)
    assert await looped.has_texts(short) == NONE
    assert await looped.has_texts(unlimited) == ALL
    await looped.run(after_s=62)
    assert await looped.has_texts(unlimited) == NONE
    assert await looped.has_texts(stored) == ALL


async def test_a_reader_keeps_the_texts_until_it_has_been_gone_for_the_grace(looped: Looped) -> None:
    record = await looped.ended(grace=timedelta(seconds=1), is_stored=False)
    await looped.stores.log.attach_many(GATEWAY, [(record.generation_id, 0)])
    await looped.run(after_s=0.5)
    assert await looped.has_texts(record) == ALL
    await looped.stores.log.unwatch_many(GATEWAY, [record.generation_id])
    await looped.run(after_s=3)
    assert await looped.has_texts(record) == NONE


async def test_while_the_log_is_away_nothing_is_deleted_and_the_other_steps_go_on(
    looped: Looped, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = await looped.ended(grace=timedelta(0), is_stored=False)
    [row] = await looped.stores.store.list_sessions()
    await looped.stores.store.end_session(row.session_id, row.owner_epoch)

    async def away(generation_ids: object) -> None:
        raise UnavailableError("away")

    with monkeypatch.context() as broken:
        broken.setattr(looped.stores.log, "drop_many", away)
        await looped.run(after_s=100)
    assert await looped.has_texts(record) == ALL
    assert await looped.stores.store.list_sessions(include_over=True) == []
    await looped.run(after_s=100)
    assert await looped.has_texts(record) == NONE


async def test_a_log_that_nobody_closed_is_closed(looped: Looped) -> None:
    await looped.ended()
    forgotten = await looped.ended(is_sealed=False)
    await looped.run(after_s=0)
    assert looped.closed == [forgotten.generation_id]
    [view] = await looped.stores.log.read_many([(forgotten.generation_id, 0)])
    assert view.terminal == LogEnd.of(forgotten)
    await looped.run(after_s=0)
    assert looped.closed == [forgotten.generation_id]
