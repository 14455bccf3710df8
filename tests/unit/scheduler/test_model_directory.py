import pytest

from scheduler.model_directory import KEPT_S, KEPT_WITHOUT_S, REMEMBERED_S, ModelDirectory, SessionSizes
from state_store.memory.store import MemoryStore
from state_store.model import ModelKey
from tests.support.generations import LEASE, MODEL_KEY, new_session
from tests.support.scheduler_rig import ManualClock

OTHER_KEY = ModelKey(revision="other", precision="fp32")


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def directory(store, clock):
    return ModelDirectory(store=store, clock=clock)


async def test_a_model_without_a_session_has_no_sizes(store, directory):
    await store.open_session(new_session(model_key=OTHER_KEY), lease=LEASE)
    assert await directory.sizes_of(MODEL_KEY) == []


async def test_the_sizes_are_those_of_every_live_session_of_the_model(store, directory):
    await store.open_session(new_session(num_blocks=10, block_size=16, context_length=100), lease=LEASE)
    await store.open_session(new_session(num_blocks=4, block_size=16, context_length=200), lease=LEASE)
    found = await directory.sizes_of(MODEL_KEY)
    assert {(each.capacity_tokens, each.context_length) for each in found} == {(160, 100), (64, 200)}


async def test_a_first_worker_is_noticed_almost_at_once(store, clock, directory):
    assert await directory.sizes_of(MODEL_KEY) == []
    await store.open_session(new_session(), lease=LEASE)
    assert await directory.sizes_of(MODEL_KEY) == []
    clock.advance(KEPT_WITHOUT_S)
    assert len(await directory.sizes_of(MODEL_KEY)) == 1


async def test_a_model_counts_as_served_for_a_while_after_its_last_worker_went(store, clock, directory):
    session = new_session()
    await store.open_session(session, lease=LEASE)
    assert await directory.sizes_of(MODEL_KEY)
    await store.lose_session(session.session_id, 1)
    clock.advance(REMEMBERED_S)
    assert await directory.sizes_of(MODEL_KEY)
    clock.advance(0.1)
    assert not await directory.sizes_of(MODEL_KEY)


async def test_the_store_is_asked_once_in_a_while(store, clock, directory, monkeypatch):
    await store.open_session(new_session(), lease=LEASE)
    calls = []
    list_sessions = store.list_sessions

    async def counted():
        calls.append(clock.seconds)
        return await list_sessions()

    monkeypatch.setattr(store, "list_sessions", counted)
    for _ in range(5):
        await directory.sizes_of(MODEL_KEY)
    clock.advance(KEPT_S)
    await directory.sizes_of(MODEL_KEY)
    assert calls == [0.0, KEPT_S]


def test_a_sequence_needs_a_place_in_the_context_and_in_memory():
    assert SessionSizes(context_length=100, capacity_tokens=160).can_hold(100)
    assert not SessionSizes(context_length=100, capacity_tokens=160).can_hold(101)
    assert not SessionSizes(context_length=100, capacity_tokens=99).can_hold(100)
