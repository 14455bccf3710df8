"""Callers that cannot wait hear that the store is away; callers of a slow statement wait for it."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest

from state_store.errors import StoreUnavailableError
from state_store.pulse import Pulse, PulseSettings

SETTINGS = PulseSettings(
    suspicion=timedelta(milliseconds=5),
    answer=timedelta(milliseconds=20),
    pause=timedelta(milliseconds=1),
    give_up=timedelta(milliseconds=20),
)


class Store:
    """Answers calls while `is_open` is set, and probes while `answers_probes` is."""

    def __init__(self) -> None:
        self.is_open = asyncio.Event()
        self.answers_probes = asyncio.Event()
        self.num_probes = 0
        self.was_cancelled = asyncio.Event()

    async def call(self) -> str:
        try:
            await self.is_open.wait()
        except asyncio.CancelledError:
            self.was_cancelled.set()
            raise
        return "done"

    async def probe(self) -> None:
        self.num_probes += 1
        await self.answers_probes.wait()

    async def refuse(self) -> None:
        self.num_probes += 1
        if not self.answers_probes.is_set():
            raise ConnectionError


@pytest.fixture
def store() -> Store:
    return Store()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_a_prompt_call_is_not_suspected(store: Store) -> None:
    pulse = Pulse(store.probe, settings=SETTINGS)
    store.is_open.set()
    assert await pulse.while_answering(store.call) == "done"
    assert store.num_probes == 0


async def test_a_slow_call_is_waited_for_while_the_store_answers(store: Store) -> None:
    pulse = Pulse(store.probe, settings=SETTINGS)
    store.answers_probes.set()
    task = asyncio.create_task(pulse.while_answering(store.call))
    await until(lambda: store.num_probes >= 3)
    assert not task.done()
    store.is_open.set()
    assert await task == "done"
    await pulse.close()


@pytest.mark.parametrize("how", ["hangs", "refuses"])
async def test_a_call_to_a_store_that_is_away_ends_and_later_ones_end_at_once(store: Store, how: str) -> None:
    probe: Callable[[], Awaitable[None]] = store.probe if how == "hangs" else store.refuse
    pulse = Pulse(probe, settings=SETTINGS)
    with pytest.raises(StoreUnavailableError):
        await pulse.while_answering(store.call)
    await asyncio.wait_for(store.was_cancelled.wait(), 5)
    store.is_open.set()
    assert pulse.is_silent
    with pytest.raises(StoreUnavailableError):
        await pulse.while_answering(store.call)
    await pulse.close()


async def test_a_store_that_comes_back_is_noticed_although_nobody_asks(store: Store) -> None:
    pulse = Pulse(store.probe, settings=SETTINGS)
    with pytest.raises(StoreUnavailableError):
        await pulse.while_answering(store.call)
    store.answers_probes.set()
    await until(lambda: not pulse.is_silent)
    store.is_open.set()
    assert await pulse.while_answering(store.call) == "done"


async def test_the_error_of_a_call_is_its_callers(store: Store) -> None:
    async def fail() -> None:
        raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        await Pulse(store.probe, settings=SETTINGS).while_answering(fail)


async def test_a_caller_that_leaves_takes_its_call_along(store: Store) -> None:
    pulse = Pulse(store.probe, settings=SETTINGS)
    store.answers_probes.set()
    task = asyncio.create_task(pulse.while_answering(store.call))
    await until(lambda: store.num_probes > 0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.wait_for(store.was_cancelled.wait(), 5)
    await pulse.close()
