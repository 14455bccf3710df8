import pytest

from scheduler import tenant_weights
from scheduler.tenant_weights import KEPT_S, TenantWeights
from state_store.errors import StoreUnavailableError
from tests.support.scheduler_rig import ManualClock


class Weights:
    """A WeightStore that counts."""

    def __init__(self, **weights):
        self.weights_by_tenant = weights
        self.asked = []
        self.is_reachable = True

    async def weights(self, tenant_ids):
        if not self.is_reachable:
            raise StoreUnavailableError("away")
        self.asked.append(list(tenant_ids))
        return {each: self.weights_by_tenant[each] for each in tenant_ids if each in self.weights_by_tenant}


@pytest.fixture
def store():
    return Weights(a=3.0, b=0.5)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def weights(store, clock):
    return TenantWeights(store=store, clock=clock)


async def test_a_tenant_that_nobody_knows_weighs_one(weights):
    assert await weights.of({"a", "b", "stranger"}) == {"a": 3.0, "b": 0.5, "stranger": 1.0}


async def test_only_what_is_not_known_is_asked_for_and_all_of_it_at_once(store, weights):
    await weights.of({"a"})
    await weights.of({"a", "b", "stranger"})
    await weights.of({"a", "b", "stranger"})
    assert store.asked == [["a"], ["b", "stranger"]]


async def test_a_changed_weight_is_noticed_after_some_seconds(store, clock, weights):
    await weights.of({"a"})
    store.weights_by_tenant["a"] = 7.0
    clock.advance(KEPT_S - 0.1)
    assert await weights.of({"a"}) == {"a": 3.0}
    clock.advance(0.1)
    assert await weights.of({"a"}) == {"a": 7.0}


async def test_without_the_store_older_weights_go_on(store, clock, weights):
    await weights.of({"a"})
    clock.advance(KEPT_S)
    store.is_reachable = False
    assert await weights.of({"a", "b"}) == {"a": 3.0, "b": 1.0}
    store.is_reachable = True
    assert await weights.of({"b"}) == {"b": 0.5}


async def test_no_more_tenants_are_kept_than_the_bound(store, weights, monkeypatch):
    monkeypatch.setattr(tenant_weights, "MAX_TENANTS", 2)
    for name in ("a", "b", "c", "a"):
        await weights.of({name})
    assert store.asked == [["a"], ["b"], ["c"], ["a"]]
