"""A request that needs most of a worker's KV memory, among small ones that always fill it."""

import asyncio
from collections.abc import Sequence

from bench.fairness.arena import Arena, Plan, Setting, TenantPlan, run
from bench.fairness.load import Ask, Backlog, Call, Tenant, asks, background
from bench.figures import Figure

_TRIALS = 4
_BEFORE_S = 4.0
_WARM_UP_S = 3.0
_BETWEEN_S = 2.0
_LARGE_PROMPT_TOKENS = 820
_NUM_BLOCKS = 64  # of 16 tokens: the small ones of a worker hold about 24 of them, the large one needs 52


def large_head(plan: Plan) -> Sequence[Figure]:
    """Two workers, so that the others have somewhere to go on."""
    setting = Setting(
        tenants=[TenantPlan(name="small"), TenantPlan(name="large")],
        workers=2,
        slots=4,
        num_blocks=_NUM_BLOCKS,
        prefill_tokens_per_s=20_000,
    )
    return run(setting, _large_head, plan)


async def _large_head(arena: Arena) -> Sequence[Figure]:
    small, large = arena.tenants["small"], arena.tenants["large"]
    starts: list[float] = []
    flows: list[float] = []
    load = Backlog(small, asks(prompt_tokens=32, output_tokens=50), arena.rng, count=24)
    async with background(load.run()):
        await asyncio.sleep(_WARM_UP_S)
        arena.cpu.restart()
        for number in range(arena.plan.count(_TRIALS)):
            await asyncio.sleep(_BEFORE_S)
            prompt = f"{number} ".ljust(_LARGE_PROMPT_TOKENS, "x")
            call = await large.generate(Ask(prompt=prompt, output_tokens=40))
            if not call.is_whole:
                raise RuntimeError(f"the large request failed: {call}")
            starts.append(call.ttft_s)
            flows.append(_flow(small, call))
            await asyncio.sleep(_BETWEEN_S)
        cpu = arena.cpu.shares()
    told = ", ".join(f"{100 * flow:.0f}" for flow in flows)
    return [
        Figure(
            name="large head: longest time to its start, s",
            value=max(starts),
            at_most=4,
            note="the trials' " + ", ".join(f"{start:.2f}" for start in starts),
        ),
        Figure(
            name="large head: tokens/s of the others while it waits, % of before",
            value=100 * sum(flow * start for flow, start in zip(flows, starts, strict=True)) / sum(starts),
            at_least=80,
            note=f"over all waits; the trials' {told}; before: the {_BEFORE_S:.0f} s before each",
        ),
        *cpu.figures("large head"),
    ]


def _flow(small: Tenant, call: Call) -> float:
    """Tokens per second of the others between call and first text, of those before."""
    assert call.first_text_s is not None
    before = small.served_between(call.started_s - _BEFORE_S, call.started_s) / _BEFORE_S
    return small.served_between(call.started_s, call.first_text_s) / (call.first_text_s - call.started_s) / before
