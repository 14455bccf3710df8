"""After any history the queue's keys are exactly those of the requests it holds; when idle, nothing of a request is left."""

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from datetime import timedelta

import pytest

from scheduler.queue.codec import to_us
from scheduler.queue.port import OutputCharge, Popped, QueueEntry
from scheduler.queue.redis_queue import RedisAdmissionQueue
from scheduler.queue.settings import QueueSettings
from service_kit.ids import GenerationId
from state_store.model import PriorityClass
from tests.support.admission_queues import MODEL, QueueUnderTest, entry_of, room_of, server_queue
from tests.support.queue_keys import (
    Live,
    active_tenants,
    contents_of,
    counters_of,
    read_contents,
    without_history,
)

TENANTS = ("a", "b", "ü:{x}", "d")
HOLD = QueueSettings().pop_hold


@pytest.fixture(params=["valkey", "redis"])
async def under_test(request: pytest.FixtureRequest) -> AsyncIterator[QueueUnderTest]:
    async with server_queue(request.getfixturevalue(f"{request.param}_server").url, QueueSettings()) as under_test:
        await under_test.queue.mark_ready()
        yield under_test


@dataclass
class History:
    """Random requests, and which of them the queue must hold: a model that knows no script."""

    under_test: QueueUnderTest
    random: random.Random
    live: dict[GenerationId, Live] = field(default_factory=dict)
    running: list[QueueEntry] = field(default_factory=list)
    popped: list[Popped] = field(default_factory=list)
    num_expired: int = 0

    @property
    def queue(self) -> RedisAdmissionQueue:
        assert isinstance(self.under_test.queue, RedisAdmissionQueue)
        return self.under_test.queue

    async def step(self) -> None:
        self.under_test.advance(self.random.random() * 0.2)
        steps = [self.submit] * 5 + [self.pop] * 2 + [self.settle] * 3 + [self.complete] * 2 + [self.cancel, self.reap]
        await self.random.choice(steps)()

    async def submit(self) -> None:
        now = self.under_test.clock()
        chance = self.random.random
        entry = replace(
            entry_of(
                self.random.choice(TENANTS),
                prompt_tokens=self.random.randrange(50),
                max_tokens=self.random.randrange(1, 60),
                priority_class=self.random.choice(list(PriorityClass)),
                deadline_at=now + timedelta(seconds=chance() * 8) if chance() < 0.6 else None,
                ready_at=now + timedelta(seconds=chance()) if chance() < 0.3 else None,
                is_charged=chance() < 0.2,
                weight=self.random.choice([1.0, 3.0]),
            ),
            arrived_at=now,
            order_at=now + timedelta(seconds=chance()),
        )
        await self.queue.enqueue_many([entry])
        self._hold(entry)

    def _hold(self, entry: QueueEntry) -> None:
        is_delayed = entry.ready_at is not None and entry.ready_at > self.under_test.clock()
        self.live[entry.generation_id] = Live(entry=entry, is_delayed=is_delayed)

    async def pop(self) -> None:
        room = room_of(self.random.randrange(150), session=self.random.choice("stu"), capacity=150)
        popped = await self.queue.pop(MODEL, [room], max_entries=6)
        self.expire()
        held_until_us = to_us(self.under_test.clock() + HOLD)
        for pop in popped:
            known = self.live[pop.entry.generation_id]
            assert known == Live(entry=pop.entry)  # queued, ripe and not expired: nothing lost, nothing twice
            self.live[pop.entry.generation_id] = replace(known, pop_id=pop.pop_id, held_until_us=held_until_us)
        self.popped += popped

    def expire(self) -> None:
        """What a pop or depth does first."""
        now = self.under_test.clock()
        for generation_id, each in list(self.live.items()):
            entry = each.entry
            if each.pop_id is None and entry.deadline_at is not None and entry.deadline_at <= now:
                del self.live[generation_id]
                self.num_expired += 1
            elif each.is_delayed and entry.ready_at is not None and entry.ready_at <= now:
                self.live[generation_id] = replace(each, is_delayed=False)

    async def settle(self) -> None:
        if not self.popped:
            return
        pop = self.popped.pop(self.random.randrange(len(self.popped)))
        end = self.random.choice([self.queue.ack_many, self.queue.drop_many, self.queue.return_many])
        await end([pop])
        known = self.live.get(pop.entry.generation_id)
        if known is None or known.pop_id != pop.pop_id:
            return
        if end == self.queue.return_many:
            self.live[pop.entry.generation_id] = Live(entry=pop.entry)
            return
        del self.live[pop.entry.generation_id]
        if end == self.queue.ack_many:
            self.running.append(pop.entry)

    async def complete(self) -> None:
        """Of what runs, one ends or is lost and queued again, after some output."""
        if not self.running:
            return
        entry = self.running.pop()
        charge = OutputCharge(model_key=MODEL, tenant_id=entry.tenant_id, weight=entry.weight, tokens=5)
        await self.queue.charge_many([charge])
        if self.random.random() < 0.3:
            again = replace(entry, attempt=entry.attempt + 1, is_charged=True, deadline_at=None, ready_at=None)
            await self.queue.enqueue_many([again])
            self._hold(again)

    async def cancel(self) -> None:
        if self.live:
            generation_id = self.random.choice(list(self.live))
            await self.queue.remove_many([(MODEL, generation_id)])
            del self.live[generation_id]

    async def reap(self) -> None:
        now_us = to_us(self.under_test.clock())
        overdue = [each for each in self.live.values() if each.pop_id is not None and each.held_until_us <= now_us]
        assert await self.queue.reap_in_flight([MODEL]) == len(overdue)
        for each in overdue:
            self.live[each.entry.generation_id] = Live(entry=each.entry)

    async def compare(self) -> None:
        await self.queue.pop(MODEL, [], max_entries=0)
        self.expire()
        contents = await read_contents(self.queue._client)
        assert without_history(contents) == contents_of(self.live.values())
        assert contents.get("counters", {}).keys() == active_tenants(self.live.values())
        counters_of(contents)
        waiting = {g for key, members in contents.items() if key.startswith("waiting:") for g in members}
        assert contents.get("skipped", {}).keys() <= waiting
        earmarks = contents.get("earmarks", {})
        assert {value.decode() for value in earmarks.values()} == contents.get("earmarked", {}).keys() <= waiting
        assert earmarks.keys() == contents.get("earmark_leases", {}).keys()


async def test_after_2000_random_steps_the_keys_are_exactly_those_of_the_live_requests(
    under_test: QueueUnderTest,
) -> None:
    history = History(under_test=under_test, random=random.Random(8))
    for number in range(2000):
        await history.step()
        if number % 250 == 249:
            await history.compare()
    assert history.num_expired > 100
    assert len(history.live) > 20
    for each in list(history.live.values()):
        await history.queue.remove_many([(MODEL, each.entry.generation_id)])
    contents = await read_contents(history.queue._client)
    assert contents.keys() <= {"marker", "meta", "idle_counters"}
    assert len(contents["idle_counters"]) <= len(TENANTS)
    assert contents["meta"].keys() == {"turn", "window", "popped", "popped_before", "floor"}
