"""Fairness, classes, large prompts and routing through the whole scheduler, with workers of the simulated engine. Time
passes in steps, so every run is the same."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from scheduler.queue.settings import QueueSettings
from service_kit.ids import GenerationId, TenantId
from state_store.model import NewGeneration, PriorityClass
from state_store.tenant_store import NewTenant
from tests.support.scheduler_rig import make_generation
from tests.support.simulated_workers import SimulatedStack
from tests.support.tiny_models import make_simulated_model

STEP_S = 0.02


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "sim"
    make_simulated_model(path, context_length=4096)
    return path


def request(stack: SimulatedStack, prompt: Sequence[int], output: int, **changes: object) -> NewGeneration:
    made = make_generation(prompt_token_ids=tuple(prompt), max_output_tokens=output, **changes)  # type: ignore[arg-type]
    return replace(made, model_key=stack.model_key)


async def submit_all(stack: SimulatedStack, items: Sequence[NewGeneration]) -> list[GenerationId]:
    return [await stack.submit(item) for item in items]


async def served_tokens(stack: SimulatedStack, steps: int) -> Counter[TenantId]:
    """Prompt and output tokens that each tenant gets in so many steps."""
    before = await _tokens_so_far(stack)
    for _ in range(steps):
        await stack.step()
    return await _tokens_so_far(stack) - before


async def _tokens_so_far(stack: SimulatedStack) -> Counter[TenantId]:
    tokens: Counter[TenantId] = Counter()
    given = [generation_id for worker in stack.workers for generation_id in worker.given]
    records = await stack.store.get_many(given)
    views = await stack.log.read_many([(generation_id, 0) for generation_id in given])
    for record, view in zip(records, views, strict=True):
        assert record is not None
        tokens[record.tenant_id] += record.num_prompt_tokens + view.end.sequence_number
    return tokens


async def test_a_tenant_with_ten_times_the_requests_and_four_times_the_output_gets_no_more_tokens(
    directory: Path,
) -> None:
    stack = SimulatedStack(directory, step_s=STEP_S)
    await stack.start(1, max_running=8, num_blocks=400)
    few, many = TenantId("few"), TenantId("many")
    await submit_all(stack, [request(stack, range(40), 64, tenant_id=many) for _ in range(600)])
    await submit_all(stack, [request(stack, range(40), 16, tenant_id=few) for _ in range(300)])
    await served_tokens(stack, 100)
    served = await served_tokens(stack, 600)
    assert served[few] / served[many] == pytest.approx(1, rel=0.05)


async def test_weights_share_the_tokens_between_tenants(directory: Path) -> None:
    stack = SimulatedStack(directory, step_s=STEP_S)
    await stack.start(1, max_running=8, num_blocks=400)
    heavy, light = TenantId("heavy"), TenantId("light")
    await stack.store.create_tenant(NewTenant(tenant_id=heavy, name="heavy", weight=3.0), actor="operator:test")
    await stack.store.create_tenant(NewTenant(tenant_id=light, name="light"), actor="operator:test")
    for tenant_id in (light, heavy):
        await submit_all(stack, [request(stack, range(40), 32, tenant_id=tenant_id) for _ in range(400)])
    await served_tokens(stack, 100)
    served = await served_tokens(stack, 600)
    assert served[heavy] / served[light] == pytest.approx(3, rel=0.05)


async def test_an_urgent_request_starts_within_two_steps_on_a_worker_that_is_full_of_batch_work(
    directory: Path,
) -> None:
    stack = SimulatedStack(directory, step_s=STEP_S)
    await stack.start(1, max_running=4, num_blocks=64)
    batch = [request(stack, range(60), 40, priority_class=PriorityClass.BATCH) for _ in range(12)]
    ids = await submit_all(stack, batch)
    for _ in range(5):
        await stack.step()
    for _ in range(8):
        urgent = await stack.submit(request(stack, range(60), 3, priority_class=PriorityClass.INTERACTIVE))
        for _ in range(2):
            await stack.step()
        (view,) = await stack.log.read_many([(urgent, 0)])
        assert view.end.sequence_number >= 1
    await stack.run_until_ended(ids, max_steps=1000)
    assert stack.workers[0].engine.load_report().num_preempted >= 8
    assert (await stack.queue.depth(stack.model_key)).num_queued == 0


async def test_a_prompt_that_needs_most_of_the_memory_starts_in_time_among_small_ones_and_they_go_on(
    directory: Path,
) -> None:
    stack = SimulatedStack(directory, step_s=STEP_S)
    await stack.start(2, max_running=16, num_blocks=64, has_prefix_cache=False)
    small_tenant, large_tenant = TenantId("small"), TenantId("large")
    sizes = random.Random(1)
    for _ in range(50):
        await submit_small(stack, sizes, small_tenant, 8)
        await stack.step()
    large = await stack.submit(request(stack, [7] * 800, 5, tenant_id=large_tenant))
    ended_before = len(stack.ends())
    begun_at_s = stack.clock.seconds
    while large not in stack.ends():
        await submit_small(stack, sizes, small_tenant, 2)
        await stack.step()
        assert stack.clock.seconds - begun_at_s < 4
    num_steps = (stack.clock.seconds - begun_at_s) / STEP_S
    assert num_steps > 100, "nothing was in its way: the test shows nothing"
    assert len(stack.ends()) - ended_before > num_steps / 5, "the small ones went on meanwhile"


class UrgentClients:
    """As many INTERACTIVE requests as there are clients, at every moment."""

    def __init__(self, stack: SimulatedStack, number: int, *, prompt: int, output: int) -> None:
        self._stack = stack
        self._prompt = prompt
        self._output = output
        self._rng = random.Random(number)
        self._waits_for: list[GenerationId | None] = [None] * number
        self.num_served = 0

    async def step(self) -> None:
        ended = self._stack.ends()
        for index, waits_for in enumerate(self._waits_for):
            if waits_for is None or waits_for in ended:
                self.num_served += waits_for is not None
                output = self._rng.randrange(self._output // 2, self._output)
                asked = request(self._stack, range(self._prompt), output, priority_class=PriorityClass.INTERACTIVE)
                self._waits_for[index] = await self._stack.submit(asked)
        await self._stack.step()

    async def seconds_until(self, ended: GenerationId, *, at_most_s: float) -> float:
        begun_at_s = self._stack.clock.seconds
        while ended not in self._stack.ends():
            await self.step()
            assert self._stack.clock.seconds - begun_at_s < at_most_s
        return self._stack.clock.seconds - begun_at_s


BATCH_TENANT = TenantId("batch")


async def test_a_large_batch_request_ends_while_urgent_ones_fill_the_memory(directory: Path) -> None:
    stack = SimulatedStack(directory, step_s=STEP_S)
    await stack.start(1, max_running=16, num_blocks=64, has_prefix_cache=False)
    clients = UrgentClients(stack, 20, prompt=80, output=60)
    for _ in range(100):
        await clients.step()
    batch = PriorityClass.BATCH
    large = await stack.submit(request(stack, [7] * 800, 20, tenant_id=BATCH_TENANT, priority_class=batch))
    starving_s = QueueSettings().starving_after.total_seconds()
    took_s = await clients.seconds_until(large, at_most_s=starving_s + 8)
    assert took_s > starving_s - 1, "it was not in the way of anybody: the test shows nothing"
    assert stack.ends()[large] == 20


async def test_large_batch_requests_that_starve_together_leave_most_to_urgent_ones(directory: Path) -> None:
    stack = SimulatedStack(directory, step_s=STEP_S)
    await stack.start(1, max_running=16, num_blocks=64, has_prefix_cache=False)
    clients = UrgentClients(stack, 20, prompt=80, output=60)
    batch = PriorityClass.BATCH
    for _ in range(4):
        last = await stack.submit(request(stack, [7] * 800, 2, tenant_id=BATCH_TENANT, priority_class=batch))
    for _ in range(1450):
        await clients.step()
    served_before = clients.num_served
    await clients.seconds_until(last, at_most_s=20)
    assert clients.num_served - served_before >= 4 * 7


async def test_a_small_batch_request_ends_while_urgent_ones_fill_the_slots(directory: Path) -> None:
    stack = SimulatedStack(directory, step_s=STEP_S)
    await stack.start(1, max_running=4, num_blocks=400)
    clients = UrgentClients(stack, 10, prompt=20, output=60)
    for _ in range(100):
        await clients.step()
    batch = PriorityClass.BATCH
    small = await stack.submit(request(stack, range(20), 100, tenant_id=BATCH_TENANT, priority_class=batch))
    await clients.seconds_until(small, at_most_s=40)
    assert stack.ends()[small] == 100


async def submit_small(stack: SimulatedStack, sizes: random.Random, tenant_id: TenantId, number: int) -> None:
    items = [
        request(stack, range(sizes.randrange(60, 100)), sizes.randrange(10, 90), tenant_id=tenant_id)
        for _ in range(number)
    ]
    if (await stack.queue.depth(stack.model_key)).num_queued < 20:
        await submit_all(stack, items)


@dataclass(slots=True)
class Conversation:
    """Each turn's prompt is all that was said before, and a new message."""

    text: list[int]
    rng: random.Random
    next_turn_at_s: float
    waits_for: GenerationId | None = None
    num_turns: int = 0
    thinking_s: tuple[float, float] = field(default=(0.5, 2.5))

    async def take_turn(self, stack: SimulatedStack, max_turns: int) -> None:
        if self.waits_for is not None and self.waits_for in stack.ends():
            (output,) = await stack.store.read_output_many([self.waits_for])
            assert output is not None
            self.text += output.token_ids
            self.waits_for, self.num_turns = None, self.num_turns + 1
            self.next_turn_at_s = stack.clock.seconds + self.rng.uniform(*self.thinking_s)
        if self.waits_for is None and self.num_turns < max_turns and stack.clock.seconds >= self.next_turn_at_s:
            self.text += [self.rng.randrange(33, 126) for _ in range(64)]
            self.waits_for = await stack.submit(request(stack, self.text, 20))


async def converse(directory: Path, *, workers: int, seed: int) -> SimulatedStack:
    """20 conversations of 5 turns that begin with one of 4 system prompts of 480 tokens."""
    stack = SimulatedStack(directory, step_s=STEP_S)
    await stack.start(workers, max_running=16, num_blocks=2048, step_tokens=200)
    rng = random.Random(seed)
    conversations = [
        Conversation([32 + number % 4] * 480, random.Random(rng.getrandbits(32)), rng.uniform(0, 2.5))
        for number in range(20)
    ]
    while any(each.num_turns < 5 for each in conversations):
        for each in conversations:
            await each.take_turn(stack, 5)
        await stack.step()
    return stack


def hit_rate(stack: SimulatedStack) -> float:
    reports = [worker.engine.load_report() for worker in stack.workers]
    cached = sum(report.num_cached_prompt_tokens for report in reports)
    return cached / (cached + sum(report.num_computed_prompt_tokens for report in reports))


@pytest.mark.parametrize("seed", [1, 2])
async def test_conversations_on_two_workers_find_their_prefixes_and_share_the_work(directory: Path, seed: int) -> None:
    one = await converse(directory, workers=1, seed=seed)
    two = await converse(directory, workers=2, seed=seed)
    assert hit_rate(two) >= 0.9 * hit_rate(one)
    work = [
        worker.engine.load_report().num_computed_prompt_tokens + sum(worker.ends.values()) for worker in two.workers
    ]
    assert 2 * max(work) / sum(work) <= 1.3
