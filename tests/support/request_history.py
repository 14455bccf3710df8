"""Random steps of callers, schedulers and workers, and deaths between them: by the real parts, and by the model of them."""

from datetime import datetime, timedelta
from typing import Any

from gateway.quota import CallQuota
from scheduler.queue.settings import QueueSettings
from service_kit.delta import make_delta
from service_kit.ids import GenerationId, RequestId
from service_kit.sampling import SamplingParams
from state_store.model import NewGeneration, PriorityClass
from state_store.quota.port import QuotaCharge
from state_store.quota.settings import QuotaSettings
from state_store.tenants import ApiKey
from tests.support.admission_queues import room_of
from tests.support.live_requests import Request
from tests.support.quota_keys import Charge
from tests.support.quotas import generation_id_at
from tests.support.request_callers import Ask, Callers
from tests.support.request_world import until
from tests.support.scripted_worker import ScriptedWorker

POP_HOLD = QueueSettings().pop_hold
UNQUEUED_AGE = timedelta(seconds=2)
RESERVATION_LEASE = QuotaSettings().lease


class History(Callers):
    """Random steps of everybody."""

    async def step(self) -> None:
        self.world.clock.advance(self.random.random() * 0.12)
        steps = {
            self.submit: 36,
            self.dispatch: 8,
            self.speak: 13,
            self.cancel: 8,
            self.reap: 8,
            self.compare_reservations: 3,
            self.die_with_a_reservation: 2,
            self.die_behind_the_commit: 3,
            self.die_with_a_pop: 4,
            self.give_a_pop_back: 2,
            self.world.scheduler.parts.charges.flush_once: 6,
            self.lose_the_worker: 1,
        }
        await self.random.choices(list(steps), list(steps.values()))[0]()

    # -- what schedulers and workers do

    async def dispatch(self) -> None:
        world, now = self.world, self.world.now()
        await world.scheduler.dispatch()
        queued = world.queued()
        records = await world.store.get_many([request.generation_id for request in queued])
        for request, record in zip(queued, records, strict=True):
            assert record is not None
            if record.attempt == request.attempt:
                continue
            held = request.live_entry(now)
            assert held is not None
            assert held.pop_id is None
            assert not held.is_delayed
            request.grant()
            self.done["granted"] += 1

    async def speak(self) -> None:
        """Of what runs, up to three say something or end."""
        running = self.world.running()
        await self._say(self.random.sample(running, min(3, len(running))), ends=False)

    async def _say(self, speakers: list[Request], *, ends: bool) -> None:
        """With `ends` it is the last word of all, else of some."""
        if not speakers:
            return
        worker, items, ended = self.world.worker, [], list[Request]()
        for request in speakers:
            is_last = ends or request.said == request.max_output or self.random.random() < 0.6
            items.append(self._word_of(request, is_last=is_last))
            if is_last:
                ended.append(request)
        worker.received.clear()
        worker.say_all(items)
        expected = {(request.generation_id, request.attempt) for request in ended}
        await until(lambda: bool(worker.received_of("ack")) and set(worker.ended()) == expected)
        for request in ended:
            self.world.end(request)
            self.done["completed"] += 1

    def _word_of(self, request: Request, *, is_last: bool) -> Any:
        num_new = min(self.random.randrange(0 if is_last else 1, 4), request.max_output - request.said)
        delta = None
        if num_new:
            delta = make_delta(after=request.cursor, token_ids=[5] * num_new, texts=["x"] * num_new)
            request.say(delta.end, num_new)
        reason = ("CANCELLED" if request.is_cancelled else "STOP") if is_last else ""
        item = ScriptedWorker.last_word(
            request.generation_id, request.attempt, finish_reason=reason, output_tokens=request.said
        )
        if delta is not None:
            item.first, item.prev_chain, item.chain = delta.first, delta.prev_chain, delta.chain
            item.token_ids.extend(delta.token_ids)
            item.texts.extend(delta.texts)
        return item

    async def lose_the_worker(self) -> None:
        """One that runs is charged, if it has said nothing in this attempt."""
        world, now = self.world, self.world.now()
        silent = [request for request in world.running() if not request.added]
        charged = self.random.choice([*silent, None])
        untried = [(charged.generation_id, charged.attempt)] if charged is not None else []
        await world.lose_worker(untried)
        for request in world.running():
            request.requeue(now, is_charged=request is charged)
            if request.is_cancelled or request.is_exhausted:
                world.end(request)
        self.done["lost workers"] += 1

    async def reap(self) -> None:
        world, now = self.world, self.world.now()
        await world.scheduler.parts.reaper.run_once()
        for request in list(world.live.values()):
            if request.pop is not None and request.held_until is not None and request.held_until <= now:
                request.land()
            if not request.is_queued and request.queued_at <= now - UNQUEUED_AGE:
                request.is_queued = True
                self._bind(request, now)
            if request.is_overdue(now):
                request.is_cancelled = True
                if not request.is_running:
                    world.end(request)
                self.done["expired"] += 1

    def _bind(self, request: Request, now: datetime) -> None:
        if request.generation_id not in self.world.book.charges:
            self.world.book.charges[request.generation_id] = Charge.of(
                request.key, request.entry.prompt_tokens + request.max_output, request.queued_at
            )
        self.world.book.bind(request.generation_id, now)

    async def compare_reservations(self) -> None:
        world, now = self.world, self.world.now()
        assert world.scheduler.parts.quota_reaper is not None
        await world.scheduler.parts.quota_reaper.run_once()
        for generation_id in world.book.due(now):
            if generation_id in world.live:
                world.book.bind(generation_id, now)
            else:
                del world.book.charges[generation_id]
                self.done["given back"] += 1

    async def end_all(self) -> None:
        """Until nobody wants anything."""
        while self.world.live:
            for request in self.world.queued():
                await self.cancel_one(request)
            await self._say(self.world.running(), ends=True)
        await self.world.scheduler.parts.charges.flush_once()
        self.world.clock.advance(RESERVATION_LEASE.total_seconds())
        await self.compare_reservations()

    # -- who dies between two steps

    async def die_with_a_reservation(self) -> None:
        """A gateway."""
        if await self._reserve(self._mint()) is not None:
            self.done["abandoned reservations"] += 1

    async def die_behind_the_commit(self) -> None:
        """A scheduler, and with it the bind and the entry; or an operator commits, who reserves nothing."""
        generation_id = self._mint()
        key = await self._reserve(generation_id) if self.random.random() < 0.5 else self._any_key()
        if key is None:
            return
        ask = Ask(
            num_prompt=3,
            max_output=10,
            priority_class=PriorityClass.STANDARD,
            queue_timeout=timedelta(seconds=self.random.randrange(3, 25)),
        )
        generation = NewGeneration(
            generation_id=generation_id,
            tenant_id=key.tenant.tenant_id,
            key_id=key.key_id,
            request_id=RequestId(generation_id),
            request_hash=bytes(32),
            model=self.world.manifest.model,
            model_key=self.world.model_key,
            priority_class=ask.priority_class,
            prompt_token_ids=(1, 2, 3),
            sampling=SamplingParams(max_output_tokens=ask.max_output, seed=1),
            grace=None,
            queue_timeout=ask.queue_timeout,
            deadline=None,
            traceparent="",
        )
        await self.world.store.submit_many([generation])
        self.accept(generation_id, key, ask).is_queued = False
        self.done["unqueued"] += 1

    def _mint(self) -> GenerationId:
        return generation_id_at(self.world.now())

    def _any_key(self) -> ApiKey:
        return self.random.choice(list(self.world.keys.values()))[1]

    async def _reserve(self, generation_id: GenerationId) -> ApiKey | None:
        """13 tokens, as a gateway does it, if there is place."""
        world, key, now = self.world, self._any_key(), self.world.now()
        if not world.book.has_place(key, tokens=13, now=now):
            return None
        call = CallQuota(quota=world.quota, store=world.store, key=key, request_id=None, tell=lambda _: None)
        await call.look()
        charge = QuotaCharge(
            generation_id=generation_id,
            tenant_id=key.tenant.tenant_id,
            key_id=key.key_id,
            prompt_tokens=3,
            max_output_tokens=10,
        )
        assert await call.reserve(charge)
        world.book.charges[generation_id] = Charge.of(key, 13, now)
        return key

    async def die_with_a_pop(self) -> None:
        world = self.world
        room = room_of(self.random.randrange(300), session="gone", capacity=300)
        for pop in await world.queue.pop(world.model_key, [room], max_entries=3):
            request = world.live[pop.entry.generation_id]
            assert pop.entry == request.entry
            assert request.pop is None
            request.pop, request.held_until = pop, world.now() + POP_HOLD
            self.done["abandoned pops"] += 1

    async def give_a_pop_back(self) -> None:
        """As a scheduler does whose session was taken over."""
        popped = [request for request in self.world.queued() if request.pop is not None]
        for request in popped[:1]:
            assert request.pop is not None
            await self.world.queue.return_many([request.pop])
            request.land()
