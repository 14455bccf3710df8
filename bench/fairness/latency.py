"""What others' load costs a tenant's, or a class's, first token. Quiet and loaded rounds take turns, so that what disturbs
the machine disturbs both."""

import asyncio
import random
from collections.abc import Sequence

from bench.fairness.arena import STEP_S, Arena, Plan, Setting, TenantPlan, run
from bench.fairness.load import BATCH, INTERACTIVE, Ask, Backlog, MakeAsk, Tenant, asks, backlogs, send_at_random
from bench.figures import Figure, percentile

_ROUNDS = 3
_LOAD_GROWS_S = 3.0
_LIGHT_STEP_S, _LIGHT_SLOTS = 0.2, 36


def light(plan: Plan) -> Sequence[Figure]:
    """A light tenant, alone and beside one that keeps 10 times as many requests in flight as there are slots.

    A slot that falls free is the least that the light one waits for, so the heavy one's requests are short, and not all of
    one length, or slots would fall free together and then none for several steps; and so that their number does not cost the
    machine too much, steps are long. With fewer slots it happens that none falls free in a step.
    """
    setting = Setting(
        tenants=[TenantPlan(name="heavy"), TenantPlan(name="light")], slots=_LIGHT_SLOTS, step_s=_LIGHT_STEP_S
    )
    return run(setting, _light, plan)


def _make_heavy(rng: random.Random) -> Ask:
    return asks(prompt_tokens=16, output_tokens=rng.randint(2, 6))(rng)


async def _light(arena: Arena) -> Sequence[Figure]:
    heavy, light = arena.tenants["heavy"], arena.tenants["light"]
    make = asks(prompt_tokens=16, output_tokens=2)
    alone: list[float] = []
    beside: list[float] = []
    shares = []
    for _ in range(_ROUNDS):
        alone += await _sample(arena, light, make, per_s=8, for_s=arena.plan.seconds(12))
        load = Backlog(heavy, _make_heavy, arena.rng, count=10 * _LIGHT_SLOTS)
        async with backlogs(load):
            await asyncio.sleep(_LOAD_GROWS_S)
            arena.cpu.restart()
            beside += await _sample(arena, light, make, per_s=8, for_s=arena.plan.seconds(12))
            shares.append(arena.cpu.shares())
    return [
        *_spread("light tenant alone", alone),
        *_spread("light tenant beside a heavy one", beside, at_most=1.3 * percentile(alone, 0.99) + _LIGHT_STEP_S),
        *shares[-1].figures("light"),
    ]


def interactive(plan: Plan) -> Sequence[Figure]:
    """INTERACTIVE requests while BATCH fills slots and KV memory, and more of it waits."""
    setting = Setting(tenants=[TenantPlan(name="batch"), TenantPlan(name="person")], slots=8, num_blocks=64)
    return run(setting, _interactive, plan)


async def _interactive(arena: Arena) -> Sequence[Figure]:
    batch, person = arena.tenants["batch"], arena.tenants["person"]
    make = asks(prompt_tokens=16, output_tokens=4, priority_class=INTERACTIVE)
    make_batch = asks(prompt_tokens=64, output_tokens=64, priority_class=BATCH)
    alone: list[float] = []
    loaded: list[float] = []
    shares = []
    for _ in range(_ROUNDS):
        alone += await _sample(arena, person, make, per_s=18, for_s=arena.plan.seconds(10))
        async with backlogs(Backlog(batch, make_batch, arena.rng, count=40)):
            await asyncio.sleep(_LOAD_GROWS_S)
            arena.cpu.restart()
            loaded += await _sample(arena, person, make, per_s=18, for_s=arena.plan.seconds(10))
            shares.append(arena.cpu.shares())
    num_unfinished = sum(not call.is_whole for call in batch.calls)
    return [
        *_spread("INTERACTIVE, nothing else", alone),
        *_spread("INTERACTIVE beside BATCH", loaded, at_most=1.5 * percentile(alone, 0.99) + 2 * STEP_S),
        Figure(name="INTERACTIVE beside BATCH: samples", value=len(loaded), at_least=round(500 * arena.plan.scale)),
        Figure(
            name="BATCH requests that did not finish",
            value=num_unfinished,
            at_most=0,
            note=f"of {len(batch.calls)}, {sum(call.output_tokens for call in batch.calls)} tokens",
        ),
        *shares[-1].figures("interactive"),
    ]


async def _sample(arena: Arena, tenant: Tenant, make: MakeAsk, *, per_s: float, for_s: float) -> list[float]:
    """TTFTs; a call that fails raises, because it would flatter the figure."""
    num_before = len(tenant.calls)
    await send_at_random(tenant, make, arena.rng, per_s=per_s, for_s=for_s)
    calls = tenant.calls[num_before:]
    failed = [call for call in calls if not call.is_whole]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(calls)} calls of {tenant.name} failed: {failed[0]}")
    return [call.ttft_s for call in calls]


def _spread(name: str, values: Sequence[float], *, at_most: float | None = None) -> Sequence[Figure]:
    note = f"p50 {percentile(values, 0.5):.3f}, p90 {percentile(values, 0.9):.3f} of {len(values)}"
    limit = None if at_most is None else round(at_most, 4)
    return [Figure(name=f"{name}: p99 TTFT, s", value=percentile(values, 0.99), at_most=limit, note=note)]
