"""How two tenants that both have work waiting share the tokens."""

import asyncio
import time
from collections.abc import Sequence

from bench.fairness.arena import Arena, Plan, Setting, TenantPlan, run
from bench.fairness.load import Backlog, Tenant, asks, background, backlogs
from bench.figures import Figure

_WARM_UP_S = 5.0
_MEASURED_S = 60.0
_WEIGHTED_S = 40.0
_TOLERANCE = 0.05
_PROMPT_TOKENS = 16


def shares(plan: Plan) -> Sequence[Figure]:
    """One tenant has 10 times the requests of the other in flight, and each asks for 4 times the output."""
    return run(Setting(tenants=[TenantPlan(name="many"), TenantPlan(name="few")]), _shares, plan)


async def _shares(arena: Arena) -> Sequence[Figure]:
    many, few = arena.tenants["many"], arena.tenants["few"]
    loads = (
        Backlog(many, asks(prompt_tokens=_PROMPT_TOKENS, output_tokens=100), arena.rng, count=160),
        Backlog(few, asks(prompt_tokens=_PROMPT_TOKENS, output_tokens=25), arena.rng, count=16),
    )
    async with background(*(load.run() for load in loads)):
        served = await _watch(arena, [many, few], arena.plan.seconds(_MEASURED_S))
        cpu = arena.cpu.shares()
    difference = max(served) / min(served) - 1 if min(served) else float("inf")
    note = f"{served[0]} and {served[1]} tokens in {arena.plan.seconds(_MEASURED_S):.0f} s"
    return [
        Figure(
            name="shares: tokens of two backlogged tenants differ by, %",
            value=100 * difference,
            at_most=100 * _TOLERANCE,
            note=note,
        ),
        *cpu.figures("shares"),
    ]


def weights(plan: Plan) -> Sequence[Figure]:
    """Equal loads, weights 3 and 1."""
    tenants = [TenantPlan(name="three", weight=3.0), TenantPlan(name="one", weight=1.0)]
    return run(Setting(tenants=tenants), _weights, plan)


async def _weights(arena: Arena) -> Sequence[Figure]:
    three, one = arena.tenants["three"], arena.tenants["one"]
    make = asks(prompt_tokens=_PROMPT_TOKENS, output_tokens=40)
    loads = [Backlog(tenant, make, arena.rng, count=24) for tenant in (three, one)]
    async with background(*(load.run() for load in loads)):
        served = await _watch(arena, [three, one], arena.plan.seconds(_WEIGHTED_S))
        cpu = arena.cpu.shares()
    ratio = served[0] / max(1, served[1])
    note = f"{served[0]} and {served[1]} tokens in {arena.plan.seconds(_WEIGHTED_S):.0f} s"
    return [
        Figure(
            name="weights 3 to 1: ratio of the tokens",
            value=ratio,
            at_least=3 * (1 - _TOLERANCE),
            at_most=3 * (1 + _TOLERANCE),
            note=note,
        ),
        *cpu.figures("weights"),
    ]


async def _watch(arena: Arena, tenants: Sequence[Tenant], seconds: float) -> list[int]:
    """Tokens of each in `seconds`, after the warm-up."""
    await asyncio.sleep(_WARM_UP_S)
    arena.cpu.restart()
    since_s = time.monotonic()
    await asyncio.sleep(seconds)
    return [tenant.served_between(since_s, since_s + seconds) for tenant in tenants]


def idle(plan: Plan) -> Sequence[Figure]:
    """Both tenants are busy, one falls idle, and comes back to the other's backlog."""
    return run(Setting(tenants=[TenantPlan(name="steady"), TenantPlan(name="returning")]), _idle, plan)


_BEFORE_S, _IDLE_S, _AFTER_S, _BURST_S = 5.0, 15.0, 30.0, 10.0


async def _idle(arena: Arena) -> Sequence[Figure]:
    steady, returning = arena.tenants["steady"], arena.tenants["returning"]
    make = asks(prompt_tokens=_PROMPT_TOKENS, output_tokens=40)
    after_s, burst_s = arena.plan.seconds(_AFTER_S), arena.plan.seconds(_BURST_S)
    async with background(Backlog(steady, make, arena.rng, count=24).run()):
        async with backlogs(Backlog(returning, make, arena.rng, count=24)):
            await asyncio.sleep(_BEFORE_S)
        await asyncio.sleep(arena.plan.seconds(_IDLE_S))
        arena.cpu.restart()
        since_s = time.monotonic()
        async with background(Backlog(returning, make, arena.rng, count=24).run()):
            await asyncio.sleep(after_s)
            cpu = arena.cpu.shares()
    note = f"over {after_s:.0f} s after {arena.plan.seconds(_IDLE_S):.0f} s without a request"
    return [
        Figure(
            name="idle: share after the return, of the fair half",
            value=_of_fair(returning, steady, since_s, after_s),
            at_least=1 - _TOLERANCE,
            at_most=1 + _TOLERANCE,
            note=note,
        ),
        Figure(
            name="idle: share right after the return, of the fair half",
            value=_of_fair(returning, steady, since_s, burst_s),
            at_most=1 + _TOLERANCE,
            note=f"over {burst_s:.0f} s",
        ),
        *cpu.figures("idle"),
    ]


def _of_fair(tenant: Tenant, other: Tenant, since_s: float, seconds: float) -> float:
    own, others = (each.served_between(since_s, since_s + seconds) for each in (tenant, other))
    return 2 * own / max(1, own + others)
