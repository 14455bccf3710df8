"""When tokens go out: at once while streams are few, together when they are many; nobody waits for a first token or an end."""

import asyncio
from datetime import timedelta

import pytest

from gpu_worker.attempts import AttemptBook
from gpu_worker.cached_prefixes import CachedPrefixes
from gpu_worker.delta_pace import DeltaPace
from gpu_worker.engine.port import CacheChanges
from gpu_worker.session_stream import (
    MAX_UNACKNOWLEDGED_BATCHES,
    EngineLostMessage,
    SessionStream,
    StateMessage,
    StreamTimes,
)
from service_kit.ids import SchedulerId, SessionId
from tests.support.attempts import FINISH, begin

PACE = DeltaPace(deltas_per_s=20, longest=timedelta(seconds=1))
"""Two streams: a delta of each every 0.1 s."""


class Source:
    """The session that the stream speaks for, as far as it is asked."""

    def __init__(self):
        self.book = AttemptBook(SessionId("s"))
        self.was_silent = False

    def state_message(self, prefixes: CacheChanges, *, is_hello: bool) -> StateMessage:
        return StateMessage(is_hello=is_hello, load=None, is_draining=False, held=self.book.held(), prefixes=prefixes)


class Wire:
    """A stream whose clock moves when it is told to."""

    def __init__(self, pace=PACE):
        self.now_s = 100.0
        self.source = Source()
        self.stream = SessionStream(
            self.source,
            owner_epoch=1,
            scheduler_id=SchedulerId("scheduler"),
            prefixes=CachedPrefixes().begin_feed(),
            times=StreamTimes(heartbeat=timedelta(hours=1), after_end=timedelta(hours=1), pace=pace),
            clock=lambda: self.now_s,
        )

    async def tokens(self):
        """Of the next batch, by generation; its end as the last one. None where nothing is to be sent now."""
        asking = asyncio.ensure_future(self.stream.next_message())
        for _ in range(5):
            await asyncio.sleep(0)
        if not asking.done():
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            return None
        message = asking.result()
        self.stream.acknowledge(message.batch)
        return {
            news.ref.generation_id: [*(news.delta.token_ids if news.delta else ()), *(["end"] if news.end else [])]
            for news in message.news
        }


@pytest.fixture
async def wire():
    wire = Wire()
    assert (await wire.stream.next_message()).is_hello
    return wire


async def test_tokens_of_many_streams_go_out_several_together_but_first_ones_and_ends_at_once(wire):
    one, two = begin(wire.source.book, generation="1"), begin(wire.source.book, generation="2")
    one.make(10)
    assert await wire.tokens() == {"1": [10]}
    one.make(11)
    two.make(20)
    assert await wire.tokens() == {"2": [20]}  # the first of the second; the first stream's token waits
    assert await wire.tokens() is None
    wire.now_s += 0.06
    two.make(21)
    one.make(12)
    assert await wire.tokens() is None
    wire.now_s += 0.06
    assert await wire.tokens() == {"1": [11, 12], "2": [21]}
    one.make(13)
    one.make(14, finish=FINISH)
    two.make(22)
    assert await wire.tokens() == {"1": [13, 14, "end"]}
    assert await wire.tokens() is None
    wire.now_s += 0.12
    assert await wire.tokens() == {"2": [22]}


async def test_what_waits_is_sent_when_its_time_has_come_without_anything_else_happening():
    wire = Wire(DeltaPace(deltas_per_s=20))
    loop = asyncio.get_running_loop()
    wire.stream._clock = loop.time
    await wire.stream.next_message()
    producer = begin(wire.source.book)
    producer.make(1)
    await wire.stream.next_message()
    producer.make(2)
    message = await asyncio.wait_for(wire.stream.next_message(), 10)
    assert [news.delta.token_ids for news in message.news] == [(2,)]


async def test_one_stream_of_a_slow_engine_gets_each_token_at_once(wire):
    producer = begin(wire.source.book)
    for token_id in range(5):
        producer.make(token_id)
        assert await wire.tokens() == {"g": [token_id]}
        wire.now_s += 0.06


async def test_a_full_window_holds_urgent_news_too(wire):
    for number in range(MAX_UNACKNOWLEDGED_BATCHES):
        begin(wire.source.book, generation=str(number)).make(number)
        await wire.stream.next_message()
    begin(wire.source.book, generation="last").make(7)
    assert await wire.tokens() is None
    wire.stream.acknowledge(1)
    assert await wire.tokens() == {"last": [7]}


async def test_before_a_farewell_everything_goes_out(wire):
    producer = begin(wire.source.book)
    producer.make(1)
    await wire.tokens()
    producer.make(2)
    wire.stream.close_after(EngineLostMessage(untried=None))
    assert await wire.tokens() == {"g": [2]}
    assert isinstance(await wire.stream.next_message(), EngineLostMessage)


def test_the_pause_follows_the_number_of_streams_up_to_the_longest():
    pace = DeltaPace(deltas_per_s=320, longest=timedelta(milliseconds=100))
    assert [pace.pause_s(number) for number in (1, 16, 32, 1000)] == [1 / 320, 0.05, 0.1, 0.1]
    assert DeltaPace().pause_s(1000) == 0
