"""Conversations with shared prefixes on two workers, compared with one worker that has every prefix."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.fairness.arena import Arena, Plan, Setting, TenantPlan, run
from bench.fairness.load import Ask, Call, Tenant
from bench.figures import Figure

_NUM_CONVERSATIONS = 20
_NUM_SYSTEM_PROMPTS = 4
_SYSTEM_TOKENS = 480
_MESSAGE_TOKENS = 192
_OUTPUT_TOKENS = 20
_TURNS = 6
_THINKING_S = (0.5, 2.5)
_WORK_BY_WORKER = """
SELECT a.worker_id, sum(g.output_tokens + octet_length(g.prompt_token_ids) / 4 - g.cached_prompt_tokens)::float AS tokens
FROM generations g JOIN attempts a USING (generation_id) GROUP BY a.worker_id
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """`work` is by worker: prompt tokens that were not cached, and output."""

    prompt_tokens: int
    cached_tokens: int
    work: tuple[float, ...]

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens


def routing(plan: Plan) -> Sequence[Figure]:
    one, two = _converse(plan, workers=1), _converse(plan, workers=2)
    imbalance = 2 * max(two.work) / sum(two.work)
    rates = f"{one.hit_rate:.3f} of {one.prompt_tokens} tokens with one worker, {two.hit_rate:.3f} with two"
    return [
        Figure(
            name="routing: prefix hit rate of two workers, % of one's",
            value=100 * two.hit_rate / one.hit_rate,
            at_least=90,
            note=rates,
        ),
        Figure(
            name="routing: busier worker's tokens, of the mean",
            value=imbalance if len(two.work) == 2 else 2.0,  # noqa: PLR2004 - two workers
            at_most=1.3,
            note="computed prompt and output: " + " and ".join(f"{tokens:.0f}" for tokens in two.work),
        ),
    ]


def _converse(plan: Plan, *, workers: int) -> _Outcome:
    outcome: list[_Outcome] = []

    async def measure(arena: Arena) -> Sequence[Figure]:
        outcome.append(await _conversations(arena))
        return []

    setting = Setting(
        tenants=[TenantPlan(name="talk")], workers=workers, slots=16, num_blocks=4096, prefill_tokens_per_s=10_000
    )
    run(setting, measure, plan)
    return outcome[0]


async def _conversations(arena: Arena) -> _Outcome:
    talk = arena.tenants["talk"]
    seeds = [arena.rng.getrandbits(32) for _ in range(_NUM_CONVERSATIONS)]
    async with asyncio.TaskGroup() as tasks:
        for number, seed in enumerate(seeds):
            rng = random.Random(seed)  # noqa: S311
            tasks.create_task(_conversation(talk, number, rng, arena.plan.count(_TURNS)))
    rows = await arena.rows(_WORK_BY_WORKER)
    return _Outcome(
        prompt_tokens=sum(call.prompt_tokens for call in talk.calls),
        cached_tokens=sum(call.cached_prompt_tokens for call in talk.calls),
        work=tuple(row["tokens"] for row in rows),
    )


async def _conversation(talk: Tenant, number: int, rng: random.Random, turns: int) -> None:
    """Each turn's prompt is all that was said before, and a new message."""
    text = f"You are assistant {number % _NUM_SYSTEM_PROMPTS}. ".ljust(_SYSTEM_TOKENS, "s")
    await asyncio.sleep(rng.uniform(0, _THINKING_S[1]))
    for _ in range(turns):
        text += f"{rng.getrandbits(128):032x}" * (_MESSAGE_TOKENS // 32)
        call: Call = await talk.generate(Ask(prompt=text, output_tokens=_OUTPUT_TOKENS))
        if not call.is_whole:
            raise RuntimeError(f"a turn failed: {call.code} {call.reason}")
        text += call.text
        await asyncio.sleep(rng.uniform(*_THINKING_S))
