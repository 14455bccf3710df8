"""Attaching, watching and pushes of the delta log, on the memory twin and on real Valkey."""

import asyncio
from datetime import timedelta

from service_kit.delta import Cursor, rest_after
from service_kit.ids import GatewayId, GenerationId, new_generation_id
from state_store.delta_log.port import AppendItem, AppendStatus, LogView, OpenItem
from tests.support.delta_logs import FAILED, SUCCEEDED, Follower, LogUnderTest, delta_after

GATEWAY = GatewayId("gw-attached")


async def test_attach_gives_what_stands_behind_the_cursor_and_then_pushes(
    log_under_test: LogUnderTest, generation_id: GenerationId
) -> None:
    follower = await Follower(log_under_test.log, f"gw-{generation_id}").start()
    await log_under_test.open(generation_id, 1)
    first, second = delta_after(Cursor(), 1, 2), delta_after(delta_after(Cursor(), 1, 2).end, 3)
    await log_under_test.append(generation_id, 1, first)
    (view,) = await log_under_test.log.attach_many(follower.gateway_id, [(generation_id, 1)])
    assert (view.deltas, view.end, view.attempt) == ((first,), first.end, 1)
    await log_under_test.append(generation_id, 1, second)
    await log_under_test.append(generation_id, 1, second)
    (batch,) = await follower.batches()
    assert [(push.attempt, push.end, push.delta, push.terminal) for push in batch] == [(1, second.end, second, None)]
    await follower.stop()


async def test_attach_works_on_an_absent_log_and_hears_of_its_open_and_end(
    log_under_test: LogUnderTest, generation_id: GenerationId
) -> None:
    follower = await Follower(log_under_test.log, f"gw-{generation_id}").start()
    views = await log_under_test.log.attach_many(follower.gateway_id, [(generation_id, 0)])
    assert views == [LogView(generation_id=generation_id, is_present=False)]
    base = delta_after(Cursor(), 1).end
    await log_under_test.open(generation_id, 3, base)
    await log_under_test.seal(generation_id, 3, SUCCEEDED)
    pushes = [push for batch in await follower.batches() for push in batch]
    assert [(push.attempt, push.end, push.delta, push.terminal) for push in pushes] == [
        (3, base, None, None),
        (3, base, None, SUCCEEDED),
    ]
    await follower.stop()


async def test_a_terminal_seal_of_an_absent_log_only_tells_the_watchers_and_forgets_them(
    log_under_test: LogUnderTest, generation_id: GenerationId
) -> None:
    follower = await Follower(log_under_test.log, f"gw-{generation_id}").start()
    await log_under_test.log.attach_many(follower.gateway_id, [(generation_id, 0)])
    assert await log_under_test.seal(generation_id, 1) == LogView(generation_id=generation_id, is_present=False)
    assert await log_under_test.seal(generation_id, 1, FAILED) == LogView(generation_id=generation_id, is_present=False)
    ((push,),) = await follower.batches()
    assert (push.generation_id, push.attempt, push.end, push.terminal) == (generation_id, 1, Cursor(), FAILED)
    assert not (await log_under_test.read(generation_id)).is_present
    assert await log_under_test.log.last_watched_many([generation_id]) == [None]
    await follower.stop()


async def test_nothing_is_lost_between_an_attach_and_the_pushes(
    log_under_test: LogUnderTest, generation_id: GenerationId
) -> None:
    follower = await Follower(log_under_test.log, f"gw-{generation_id}").start()
    await log_under_test.open(generation_id, 1)

    async def append_all() -> Cursor:
        cursor = Cursor()
        for token_id in range(60):
            delta = delta_after(cursor, token_id)
            assert await log_under_test.status(generation_id, 1, delta) is AppendStatus.OK
            cursor = delta.end
            if token_id == 20:
                is_under_way.set()
        return cursor

    is_under_way = asyncio.Event()
    appending = asyncio.create_task(append_all())
    await is_under_way.wait()
    (view,) = await log_under_test.log.attach_many(follower.gateway_id, [(generation_id, 0)])
    end = await appending
    received = [*view.deltas, *(push.delta for batch in await follower.batches() for push in batch)]
    reader = Cursor()
    for delta in received:
        assert delta is not None
        rest = rest_after(reader, delta)
        reader = rest.end if rest is not None else reader
    assert reader == end
    assert len(received) == 60
    await follower.stop()


async def test_one_call_reaches_two_gateways_with_one_batch_each(log_under_test: LogUnderTest) -> None:
    first_id, second_id, third_id = (new_generation_id() for _ in range(3))
    both = await Follower(log_under_test.log, f"gw-both-{first_id}").start()
    one = await Follower(log_under_test.log, f"gw-one-{first_id}").start()
    await log_under_test.log.open_many(
        [OpenItem(generation_id=each, attempt=1) for each in (first_id, second_id, third_id)]
    )
    await log_under_test.log.attach_many(both.gateway_id, [(first_id, 0), (second_id, 0)])
    await log_under_test.log.attach_many(one.gateway_id, [(second_id, 0)])
    delta = delta_after(Cursor(), 1, 2)
    await log_under_test.log.append_many(
        [AppendItem(generation_id=each, attempt=1, delta=delta) for each in (first_id, second_id, third_id)]
    )
    (batch_of_both,) = await both.batches()
    (batch_of_one,) = await one.batches()
    assert [(push.generation_id, push.delta) for push in batch_of_both] == [(first_id, delta), (second_id, delta)]
    assert [(push.generation_id, push.delta) for push in batch_of_one] == [(second_id, delta)]
    await both.stop()
    await one.stop()


async def test_a_watcher_whose_lease_is_over_gets_nothing(
    log_under_test: LogUnderTest, generation_id: GenerationId
) -> None:
    follower = await Follower(log_under_test.log, f"gw-{generation_id}").start()
    await log_under_test.log.attach_many(follower.gateway_id, [(generation_id, 0)])
    log_under_test.clock.advance(timedelta(seconds=14))
    await log_under_test.log.watch_many(follower.gateway_id, [generation_id])
    log_under_test.clock.advance(timedelta(seconds=14))
    await log_under_test.open(generation_id, 1)
    assert len(await follower.batches()) == 1
    log_under_test.clock.advance(timedelta(seconds=1))
    await log_under_test.append(generation_id, 1, delta_after(Cursor(), 1))
    assert await follower.batches() == []
    await follower.stop()


async def test_a_gateway_that_unwatched_gets_nothing_and_the_other_goes_on(
    log_under_test: LogUnderTest, generation_id: GenerationId
) -> None:
    leaving = await Follower(log_under_test.log, f"gw-leaving-{generation_id}").start()
    staying = await Follower(log_under_test.log, f"gw-staying-{generation_id}").start()
    for follower in (leaving, staying):
        await log_under_test.log.attach_many(follower.gateway_id, [(generation_id, 0)])
    await log_under_test.log.unwatch_many(leaving.gateway_id, [generation_id])
    await log_under_test.open(generation_id, 1)
    assert await leaving.batches() == []
    assert len(await staying.batches()) == 1
    await leaving.stop()
    await staying.stop()


async def test_last_watched_is_now_then_the_lease_end_or_the_unwatch(log_under_test: LogUnderTest) -> None:
    left, unwatched, never = (new_generation_id() for _ in range(3))
    start = log_under_test.clock()
    await log_under_test.log.attach_many(GATEWAY, [(left, 0), (unwatched, 0)])
    log_under_test.clock.advance(timedelta(seconds=3))
    assert await log_under_test.log.last_watched_many([left, unwatched, never]) == [
        log_under_test.clock(),
        log_under_test.clock(),
        None,
    ]
    await log_under_test.log.unwatch_many(GATEWAY, [unwatched, never])
    log_under_test.clock.advance(timedelta(minutes=50))
    await log_under_test.log.unwatch_many(GATEWAY, [left, unwatched])
    assert await log_under_test.log.last_watched_many([left, unwatched, never]) == [
        start + timedelta(seconds=15),
        start + timedelta(seconds=3),
        None,
    ]


async def test_the_latest_of_several_watchers_counts(log_under_test: LogUnderTest, generation_id: GenerationId) -> None:
    await log_under_test.log.attach_many(GatewayId("gw-first"), [(generation_id, 0)])
    log_under_test.clock.advance(timedelta(seconds=20))
    await log_under_test.log.attach_many(GatewayId("gw-second"), [(generation_id, 0)])
    second_at = log_under_test.clock()
    log_under_test.clock.advance(timedelta(seconds=1))
    await log_under_test.log.unwatch_many(GatewayId("gw-second"), [generation_id])
    log_under_test.clock.advance(timedelta(seconds=60))
    assert await log_under_test.log.last_watched_many([generation_id]) == [second_at + timedelta(seconds=1)]


async def test_reading_watches_nothing(log_under_test: LogUnderTest, generation_id: GenerationId) -> None:
    await log_under_test.open(generation_id, 1)
    await log_under_test.read(generation_id)
    assert await log_under_test.log.last_watched_many([generation_id]) == [None]


async def test_the_log_knows_since_when_it_keeps_watch_times(log_under_test: LogUnderTest) -> None:
    began_at = await log_under_test.log.kept_since()
    log_under_test.clock.advance(timedelta(seconds=40))
    assert await log_under_test.log.kept_since() == began_at
    await log_under_test.lose_all()
    emptied_at = log_under_test.clock()
    assert await log_under_test.log.kept_since() == emptied_at
    log_under_test.clock.advance(timedelta(seconds=40))
    assert await log_under_test.log.kept_since() == emptied_at
