"""Twice as many requests as there is capacity for."""

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence

from bench.fairness.arena import STEP_S, Arena, Plan, Setting, TenantPlan, run
from bench.fairness.load import Backlog, Call, Tenant, asks, backlogs, send_at_random
from bench.figures import Figure, percentile

_SLOTS = 8
_OUTPUT_TOKENS = 40
_CAPACITY_PER_S = _SLOTS / (_OUTPUT_TOKENS * STEP_S)
_PEAK_S, _LOAD_S, _RECOVERY_S = 12.0, 20.0, 9.0
_PROBES_PER_S = 4


def overload(plan: Plan) -> Sequence[Figure]:
    """Two tenants, each with as many requests as would fill the worker, and queues that are soon full."""
    environment = {"SLUICE_QUEUE_MAX_REQUESTS": "24", "SLUICE_QUEUE_MAX_TENANT_REQUESTS": "16"}
    tenants = [TenantPlan(name="first"), TenantPlan(name="second")]
    return run(Setting(tenants=tenants, slots=_SLOTS, environment=environment), _overload, plan)


async def _overload(arena: Arena) -> Sequence[Figure]:
    tenants = [arena.tenants["first"], arena.tenants["second"]]
    make = asks(prompt_tokens=16, output_tokens=_OUTPUT_TOKENS)
    quiet_since_s = time.monotonic()
    await send_at_random(tenants[0], make, arena.rng, per_s=2, for_s=arena.plan.seconds(15))
    quiet = tenants[0].ttfts_s(quiet_since_s, time.monotonic())
    peak = await _peak(arena, tenants)
    await asyncio.sleep(1.0)
    arena.cpu.restart()
    since_s, load_s = time.monotonic(), arena.plan.seconds(_LOAD_S)
    async with asyncio.TaskGroup() as tasks:
        for tenant in tenants:
            tasks.create_task(send_at_random(tenant, make, arena.rng, per_s=_CAPACITY_PER_S, for_s=load_s))
        await asyncio.sleep(load_s)
        cpu = arena.cpu.shares()
        probes = tasks.create_task(_probe(arena, tenants[0]))
    calls = [call for tenant in tenants for call in tenant.calls if since_s <= call.started_s < since_s + load_s]
    goodput = _tokens_per_s(tenants, since_s + load_s / 4, since_s + load_s)
    normal_s = 1.3 * percentile(quiet, 0.99) + STEP_S
    return [
        Figure(
            name="overload: goodput, % of the peak",
            value=100 * goodput / peak,
            at_least=95,
            note=f"{goodput:.0f} of {peak:.0f} tokens/s; {len(calls)} requests in {load_s:.0f} s",
        ),
        *_refusals(calls),
        Figure(
            name="overload: accepted requests that did not finish",
            value=sum(call.accepted_s is not None and not call.is_whole for call in calls),
            at_most=0,
        ),
        Figure(
            name="overload: TTFT normal again after the load, s",
            value=_normal_after_s(probes.result(), since_s + load_s, normal_s),
            at_most=5,
            note=f"normal: at most {normal_s:.3f} s, in the median of a second's {_PROBES_PER_S} probes",
        ),
        *cpu.figures("overload", own_at_most=50),
    ]


async def _peak(arena: Arena, tenants: Sequence[Tenant]) -> float:
    """Tokens per second while somebody always waits, and little."""
    make = asks(prompt_tokens=16, output_tokens=_OUTPUT_TOKENS)
    peak_s = arena.plan.seconds(_PEAK_S)
    async with backlogs(*(Backlog(tenant, make, arena.rng, count=_SLOTS) for tenant in tenants)):
        await asyncio.sleep(2.0)
        since_s = time.monotonic()
        await asyncio.sleep(peak_s)
    return _tokens_per_s(tenants, since_s, since_s + peak_s)


def _tokens_per_s(tenants: Sequence[Tenant], since_s: float, until_s: float) -> float:
    return sum(tenant.served_between(since_s, until_s) for tenant in tenants) / (until_s - since_s)


def _refusals(calls: Sequence[Call]) -> Sequence[Figure]:
    refused = [call for call in calls if call.is_refused]
    if not refused:
        return [Figure(name="overload: refusals", value=0, at_least=1)]
    kinds = {reason: sum(call.reason == reason for call in refused) for reason in {call.reason for call in refused}}
    told = ", ".join(f"{count} {reason or 'without reason'}" for reason, count in sorted(kinds.items()))
    return [
        Figure(
            name="overload: refusal, p99, ms",
            value=1000 * percentile([call.duration_s for call in refused], 0.99),
            at_most=20,
            note=f"p50 {1000 * percentile([call.duration_s for call in refused], 0.5):.1f}; {told}",
        ),
        Figure(
            name="overload: refusals without RetryInfo",
            value=sum(call.retry_after_s is None for call in refused),
            at_most=0,
            note=f"of {len(refused)}",
        ),
    ]


async def _probe(arena: Arena, tenant: Tenant) -> list[Call]:
    """Small requests at a steady rate from now on."""
    make = asks(prompt_tokens=16, output_tokens=2)
    sent = []
    async with asyncio.TaskGroup() as tasks:
        for _ in range(round(_RECOVERY_S * _PROBES_PER_S)):
            sent.append(tasks.create_task(tenant.generate(make(arena.rng))))
            await asyncio.sleep(1 / _PROBES_PER_S)
    return [task.result() for task in sent]


def _normal_after_s(probes: Sequence[Call], end_s: float, normal_s: float) -> float:
    """End of the last second whose probes were slow or refused in the median."""
    by_second = itertools.groupby(probes, key=lambda call: int(call.started_s - end_s))
    slow = [
        second + 1.0
        for second, group in by_second
        if statistics.median(call.ttft_s if call.is_whole else float("inf") for call in group) > normal_s
    ]
    return max(slow, default=0.0)
