"""Quotas that two gateways share: exact, free for what is refused, whole again after a gateway or the counts are lost."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from bench.fairness.arena import Arena, Plan, Setting, TenantPlan, run
from bench.fairness.load import Ask, Call, Tenant, background
from bench.fairness.standing import Standings, most_at_once
from bench.figures import Figure
from sluice.local.services import Service
from state_store.quota.port import QuotaKind
from state_store.tenants import QuotaLimits
from tests.support.stack import eventually

_REQUESTS_PER_MINUTE = 60
_TOKENS_PER_MINUTE = 1200
_TOKENS_EACH = 40
_PROMPT = "x" * 29  # and one more token that begins every prompt
_OUTPUT_TOKENS = 10
_BURST = 180
_CONCURRENT = 6
_CONCURRENT_S = 8.0
_NUM_CALLERS = 24
_RUNNING = 4
_UNBOUND = 8
_LOST_GATEWAY = 1
_LONG = Ask(prompt="long", output_tokens=4000, grace_s=120)
_DAY = 10_000_000


def limits(plan: Plan) -> Sequence[Figure]:
    """Two gateways."""
    tenants = [
        TenantPlan(name="requests", limits=QuotaLimits(requests_per_minute=_REQUESTS_PER_MINUTE, tokens_per_day=_DAY)),
        TenantPlan(name="tokens", limits=QuotaLimits(tokens_per_minute=_TOKENS_PER_MINUTE, tokens_per_day=_DAY)),
        TenantPlan(name="parallel", limits=QuotaLimits(max_concurrent=_CONCURRENT)),
        TenantPlan(name="crashed", limits=QuotaLimits(max_concurrent=_RUNNING + _UNBOUND)),
        TenantPlan(name="emptied", limits=QuotaLimits(max_concurrent=_UNBOUND)),
    ]
    return run(Setting(tenants=tenants, gateways=2, slots=32), _limits, plan)


async def _limits(arena: Arena) -> Sequence[Figure]:
    async with Standings.open(arena) as standings:
        return [
            *await _exactly(arena, standings, "requests", _REQUESTS_PER_MINUTE),
            *await _exactly(arena, standings, "tokens", _TOKENS_PER_MINUTE // _TOKENS_EACH),
            *await _concurrency(arena),
            *await _gateway_killed(arena, standings),
            *await _counts_emptied(arena),
        ]


async def _exactly(arena: Arena, standings: Standings, name: str, limit: int) -> Sequence[Figure]:
    """A burst over both gateways, three times the limit and more."""
    tenant = arena.tenants[name]
    ask = Ask(prompt=_PROMPT, output_tokens=_OUTPUT_TOKENS)
    calls = await asyncio.gather(*(tenant.generate(ask, gateway=number % 2) for number in range(_BURST)))
    admitted = [call for call in calls if call.accepted_s is not None]
    refused = [call for call in calls if call.reason == "QUOTA_EXCEEDED"]
    served = sum(call.prompt_tokens + call.output_tokens for call in admitted)
    charged = await standings.settled(name, QuotaKind.TOKENS_PER_DAY, served)
    told = f"{_BURST} calls over two gateways"
    return [
        Figure(name=f"limit of {name}: admitted", value=len(admitted), at_least=limit, at_most=limit, note=told),
        Figure(
            name=f"limit of {name}: others than refused with RetryInfo",
            value=_BURST - len(admitted) - sum(call.retry_after_s is not None for call in refused),
            at_most=0,
        ),
        Figure(
            name=f"limit of {name}: tokens charged but not served",
            value=charged - served,
            at_least=0,
            at_most=0,
            note=f"{served} served",
        ),
    ]


async def _concurrency(arena: Arena) -> Sequence[Figure]:
    tenant = arena.tenants["parallel"]
    ask = Ask(prompt="parallel", output_tokens=_OUTPUT_TOKENS)

    async def ask_on(number: int) -> None:
        while True:
            call = await tenant.generate(ask, gateway=number % 2)
            await asyncio.sleep(0.0 if call.is_whole else 0.1)

    async with background(*(ask_on(number) for number in range(_NUM_CALLERS))):
        await asyncio.sleep(arena.plan.seconds(_CONCURRENT_S))
    num_refused = sum(call.is_refused for call in tenant.calls)
    most = await most_at_once(arena, "parallel")
    return [
        Figure(
            name="concurrency: most generations at once",
            value=most,
            at_least=_CONCURRENT,
            at_most=_CONCURRENT,
            note=f"{len(tenant.calls) - num_refused} admitted, {num_refused} refused, by {_NUM_CALLERS} callers",
        )
    ]


@asynccontextmanager
async def _long_running(tenant: Tenant, count: int, *, gateway: int) -> AsyncIterator[list[asyncio.Task[Call]]]:
    """That many generations with text already; cut off behind the block."""
    num_before = len(tenant.calls)

    async def all_have_text() -> bool:
        return sum(call.first_text_s is not None for call in tenant.calls[num_before:]) == count

    tasks = [asyncio.create_task(tenant.generate(_LONG, gateway=gateway)) for _ in range(count)]
    try:
        await eventually(all_have_text, what="the long generations run", timeout_s=20)
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _gateway_killed(arena: Arena, standings: Standings) -> Sequence[Figure]:
    """One gateway dies with reservations whose commit it still waits for, and with generations that run. The scheduler is
    held meanwhile and dies too, so that it commits nothing of what it was sent."""
    tenant = arena.tenants["crashed"]
    stack = arena.stack
    gateway = stack.names(Service.GATEWAY)[_LOST_GATEWAY]
    (scheduler,) = stack.names(Service.SCHEDULER)
    async with _long_running(tenant, _RUNNING, gateway=_LOST_GATEWAY):
        stack.pause(scheduler)
        ask = Ask(prompt="lost", output_tokens=_OUTPUT_TOKENS)
        lost = [asyncio.create_task(tenant.generate(ask, gateway=_LOST_GATEWAY)) for _ in range(_UNBOUND)]
        await standings.until_used("crashed", QuotaKind.MAX_CONCURRENT, _RUNNING + _UNBOUND, within_s=4)
        stack.kill(gateway)
        stack.kill(scheduler)
        killed_s = time.monotonic()
        stack.local.start_service(scheduler)
        await asyncio.gather(*lost)
        await standings.until_used("crashed", QuotaKind.MAX_CONCURRENT, _RUNNING, within_s=20)
        back_s = time.monotonic() - killed_s
        await stack.serving(scheduler)
        kept = await standings.used("crashed", QuotaKind.MAX_CONCURRENT)
        calls = await asyncio.gather(*(tenant.generate(ask) for _ in range(2 * _UNBOUND)))
        stack.local.start_service(gateway)
        await stack.serving(gateway)
    committed = sum(call.accepted_s is not None for call in (task.result() for task in lost))
    return [
        Figure(
            name="gateway killed: reservations without a generation back after, s",
            value=back_s,
            at_most=10,
            note=f"{_UNBOUND} of them, {committed} committed",
        ),
        Figure(
            name="gateway killed: places that running generations keep", value=kept, at_least=_RUNNING, at_most=_RUNNING
        ),
        Figure(
            name="gateway killed: admitted afterwards",
            value=sum(call.accepted_s is not None for call in calls),
            at_least=_UNBOUND,
            at_most=_UNBOUND,
            note=f"of {len(calls)} at once",
        ),
    ]


async def _counts_emptied(arena: Arena) -> Sequence[Figure]:
    """All places are taken by running generations when Valkey loses everything; callers try on."""
    tenant = arena.tenants["emptied"]
    ask = Ask(prompt="more", output_tokens=1)
    async with _long_running(tenant, _UNBOUND, gateway=0) as running:
        arena.stack.empty_valkey()
        back_s = time.monotonic()
        tries: list[Call] = []
        while time.monotonic() < back_s + 8:
            tries += await asyncio.gather(*(tenant.generate(ask, gateway=number, timeout_s=5) for number in range(2)))
            await asyncio.sleep(0.1)
        survivors = sum(not task.done() for task in running)
    refused_s = [call.ended_s or 0.0 for call in tries if call.reason == "QUOTA_EXCEEDED"]
    others = [call for call in tries if call.reason != "QUOTA_EXCEEDED"]
    return [
        Figure(
            name="counts emptied: limits hold again after, s",
            value=max((call.ended_s or 0.0 for call in others), default=back_s) - back_s if refused_s else float("inf"),
            at_most=5,
            note=f"{len(refused_s)} of {len(tries)} tries refused by the limit",
        ),
        Figure(
            name="counts emptied: admitted beyond the limit",
            value=sum(call.accepted_s is not None for call in tries),
            at_most=0,
        ),
        Figure(name="counts emptied: streams that went on", value=survivors, at_least=_UNBOUND),
    ]
