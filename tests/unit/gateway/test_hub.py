import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest

from gateway.config import StreamLimits
from gateway.streaming.hub import StreamHub
from gateway.streaming.subscription import Subscription
from service_kit.delta import Cursor, make_delta
from service_kit.errors import UnavailableError
from service_kit.ids import GatewayId, GenerationId
from state_store.delta_log.memory import MemoryDeltaLog
from state_store.delta_log.port import AppendItem, LogView, OpenItem, Push
from state_store.memory.store import MemoryStore
from state_store.model import GenerationRecord

GATEWAY = GatewayId("gateway")
GENERATION = GenerationId("0190b5a0-0000-7000-8000-000000000000")


class Clock:
    """Seconds, set by the test."""

    def __init__(self) -> None:
        self.s = 1000.0

    def __call__(self) -> float:
        return self.s


class Rig:
    """A hub over memory twins with its clock."""

    def __init__(self, max_buffered_pushes: int = 4) -> None:
        self.clock = Clock()
        self.log = MemoryDeltaLog(clock=lambda: datetime.fromtimestamp(self.clock.s, tz=UTC))
        limits = StreamLimits(max_buffered_pushes=max_buffered_pushes)
        self.hub = StreamHub(gateway_id=GATEWAY, log=self.log, store=MemoryStore(), limits=limits, clock=self.clock)

    async def open_log(self) -> None:
        await self.log.open_many([OpenItem(generation_id=GENERATION, attempt=1)])

    async def append(self, after: Cursor, token_id: int) -> Cursor:
        delta = make_delta(after=after, token_ids=[token_id], texts=["x"])
        await self.log.append_many([AppendItem(generation_id=GENERATION, attempt=1, delta=delta)])
        return delta.end

    async def last_watched(self) -> datetime | None:
        return (await self.log.last_watched_many([GENERATION]))[0]

    @property
    def now(self) -> datetime:
        return datetime.fromtimestamp(self.clock.s, tz=UTC)


def push(number: int) -> Push:
    return Push(generation_id=GENERATION, attempt=1, end=Cursor(sequence_number=number, chain=1))


async def waiting(subscription: Subscription) -> asyncio.Task[object]:
    task: asyncio.Task[object] = asyncio.create_task(subscription.next())
    await asyncio.sleep(0)
    return task


async def test_pushes_go_to_every_reader_of_their_generation_and_to_no_other() -> None:
    rig = Rig()
    readers = [rig.hub.open(GENERATION, Cursor()) for _ in range(2)]
    other = rig.hub.open(GenerationId("other"), Cursor())
    rig.hub.take_pushes([push(1)])
    for reader in readers:
        assert await reader.next() == push(1)
    task = await waiting(other)
    assert not task.done()
    task.cancel()


async def test_a_full_inbox_is_emptied_and_the_reader_told_so_once() -> None:
    rig = Rig(max_buffered_pushes=3)
    reader = rig.hub.open(GENERATION, Cursor())
    rig.hub.take_pushes([push(n) for n in range(1, 10)])
    assert reader.num_dropped == 9
    assert await reader.next() is None
    rig.hub.take_pushes([push(10)])
    assert await reader.next() == push(10)


async def test_a_reader_that_waits_in_silence_gets_what_the_log_has() -> None:
    rig = Rig()
    await rig.open_log()
    reader = rig.hub.open(GENERATION, Cursor())
    await rig.hub.attach(reader)
    task = await waiting(reader)
    await rig.append(Cursor(), 7)
    rig.clock.s += 1.4
    await rig.hub.maintain_once()
    await asyncio.sleep(0)
    assert not task.done()
    rig.clock.s += 0.2
    await rig.hub.maintain_once()
    view = await asyncio.wait_for(task, 5)
    assert isinstance(view, LogView)
    assert view.end.sequence_number == 1


async def test_a_reader_that_does_not_wait_is_not_checked() -> None:
    rig = Rig()
    await rig.open_log()
    reader = rig.hub.open(GENERATION, Cursor())
    await rig.hub.attach(reader)
    await rig.append(Cursor(), 7)
    rig.clock.s += 10
    await rig.hub.maintain_once()
    task = await waiting(reader)
    assert not task.done()
    task.cancel()


async def test_after_a_reconnect_all_readers_attach_again_from_where_they_are() -> None:
    rig = Rig()
    await rig.open_log()
    reader = rig.hub.open(GENERATION, Cursor())
    await rig.hub.attach(reader)
    first = await rig.append(Cursor(), 7)
    await rig.append(first, 8)
    reader.cursor = first
    rig.hub.take_pushes(None)
    await rig.hub.maintain_once()
    view = await reader.next()
    assert isinstance(view, LogView)
    assert [delta.first for delta in view.deltas] == [2]


async def test_watch_leases_are_renewed_while_somebody_reads_and_end_with_the_last_reader() -> None:
    rig = Rig()
    await rig.open_log()
    first, second = (rig.hub.open(GENERATION, Cursor()) for _ in range(2))
    await rig.hub.attach(first)
    for _ in range(10):
        rig.clock.s += 5
        await rig.hub.maintain_once()
        assert await rig.last_watched() == rig.now
    rig.hub.close(first)
    rig.clock.s += 5
    await rig.hub.maintain_once()
    assert await rig.last_watched() == rig.now
    rig.hub.close(second)
    left_at = rig.now
    await rig.hub.maintain_once()
    rig.clock.s += 5
    await rig.hub.maintain_once()
    assert await rig.last_watched() == left_at


async def test_a_reader_that_comes_while_the_watching_ends_is_watched() -> None:
    rig = Rig()
    await rig.open_log()
    first = rig.hub.open(GENERATION, Cursor())
    await rig.hub.attach(first)
    rig.hub.close(first)
    original = rig.log.unwatch_many

    async def unwatch_late(gateway_id: GatewayId, generation_ids: list[GenerationId]) -> None:
        await rig.hub.attach(rig.hub.open(GENERATION, Cursor()))
        await original(gateway_id, generation_ids)

    rig.log.unwatch_many = unwatch_late  # type: ignore[method-assign, assignment]
    await rig.hub.maintain_once()
    rig.clock.s += 1
    assert await rig.last_watched() == rig.now


async def test_with_the_log_away_the_round_fails_and_the_silent_are_still_looked_at() -> None:
    rig = Rig()
    reader = rig.hub.open(GENERATION, Cursor())
    task = await waiting(reader)
    rig.log.is_reachable = False
    assert await rig.hub.attach(reader) is None
    rig.clock.s += 2
    with pytest.raises(UnavailableError):
        await rig.hub.maintain_once()
    assert reader.heard_at == rig.clock.s
    task.cancel()


async def test_ending_all_streams_lets_each_read_what_it_has() -> None:
    rig = Rig()
    reader = rig.hub.open(GENERATION, Cursor())
    rig.hub.take_pushes([push(1)])
    rig.hub.close_all(UnavailableError("over"))
    assert await reader.next() == push(1)
    with pytest.raises(UnavailableError):
        await reader.next()


async def test_a_drain_waits_for_calls_that_began_before_it_and_lets_them_open_their_stream() -> None:
    """A call that was accepted and has not opened its stream yet counts as running."""
    rig = Rig()
    with rig.hub.hold():
        rig.hub.refuse_new(UnavailableError("draining"))
        idle = asyncio.create_task(rig.hub.wait_idle())
        await asyncio.sleep(0)
        assert not idle.done()
        rig.hub.close(rig.hub.open(GENERATION, Cursor()))
        with pytest.raises(UnavailableError), rig.hub.hold():
            pass
        assert not idle.done()
    await asyncio.wait_for(idle, 5)
    rig.hub.close_all(UnavailableError("over"))
    with pytest.raises(UnavailableError):
        rig.hub.open(GENERATION, Cursor())


class StandingStore(MemoryStore):
    """Never answers."""

    def __init__(self) -> None:
        super().__init__()
        self.was_asked = asyncio.Event()

    async def get_many(self, generation_ids: Sequence[GenerationId]) -> list[GenerationRecord | None]:
        self.was_asked.set()
        await asyncio.Event().wait()
        return await super().get_many(generation_ids)


async def test_a_store_that_stands_still_does_not_end_the_watching() -> None:
    clock, store = Clock(), StandingStore()
    log = MemoryDeltaLog(clock=lambda: datetime.fromtimestamp(clock.s, tz=UTC))
    hub = StreamHub(
        gateway_id=GATEWAY,
        log=log,
        store=store,
        limits=StreamLimits(tick=timedelta(milliseconds=1)),
        clock=clock,
    )
    await log.open_many([OpenItem(generation_id=GENERATION, attempt=1)])
    running = asyncio.create_task(hub.run())
    await asyncio.wait_for(hub.wait_connected(), 10)
    reader = hub.open(GENERATION, Cursor())
    await hub.attach(reader)
    waiter = await waiting(reader)
    clock.s += 6
    await asyncio.wait_for(store.was_asked.wait(), 10)
    clock.s += 6

    async def is_renewed() -> bool:
        (last,) = await log.last_watched_many([GENERATION])
        return last is not None and last >= datetime.fromtimestamp(clock.s, tz=UTC)

    async with asyncio.timeout(10):
        while not await is_renewed():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    for task in (waiter, running):
        task.cancel()
    await asyncio.gather(waiter, running, return_exceptions=True)
