"""A flood of keys that are not valid, beside one that is."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from bench.fairness.arena import Arena, Plan, Setting, TenantPlan, run
from bench.fairness.load import Tenant, asks, background, send_at_random
from bench.figures import Figure, percentile
from inference.v1 import inference_pb2
from service_kit.api_key import mint_api_key

_ROUNDS = 2
_ROUND_S = 12.0
_GOOD_PER_S = 12
_BAD_PER_S = 100
_REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED)


def bad_keys(plan: Plan) -> Sequence[Figure]:
    return run(Setting(tenants=[TenantPlan(name="good")]), _bad_keys, plan)


async def _bad_keys(arena: Arena) -> Sequence[Figure]:
    good = arena.tenants["good"]
    make = asks(prompt_tokens=16, output_tokens=2)
    quiet: list[float] = []
    flooded: list[float] = []
    flood = _Flood(good, random.Random(arena.plan.seed))  # noqa: S311
    round_s = arena.plan.seconds(_ROUND_S)
    for _ in range(_ROUNDS):
        since_s = time.monotonic()
        await send_at_random(good, make, arena.rng, per_s=_GOOD_PER_S, for_s=round_s)
        quiet += good.ttfts_s(since_s, time.monotonic())
        arena.cpu.restart()
        async with background(flood.run()):
            since_s = time.monotonic()
            await send_at_random(good, make, arena.rng, per_s=_GOOD_PER_S, for_s=round_s)
            flooded += good.ttfts_s(since_s, time.monotonic())
        cpu = arena.cpu.shares()
    told = ", ".join(f"{count} {code.name}" for code, count in flood.answers.items())
    return [
        Figure(
            name="bad keys: calls that were not refused",
            value=sum(count for code, count in flood.answers.items() if code not in _REFUSED),
            at_most=0,
            note=f"of {sum(flood.answers.values())}: {told}",
        ),
        Figure(
            name="bad keys: good calls that failed",
            value=sum(not call.is_whole for call in good.calls),
            at_most=0,
            note=f"of {len(good.calls)}",
        ),
        Figure(
            name="bad keys: lines in the log that count them",
            value=sum("authentication_failed" in line for _, line in arena.stack.lines),
            at_least=1,
        ),
        Figure(name="bad keys: good key's p99 TTFT without them, s", value=percentile(quiet, 0.99)),
        Figure(
            name="bad keys: good key's p99 TTFT beside them, s",
            value=percentile(flooded, 0.99),
            at_most=round(2 * percentile(quiet, 0.99), 4),
            note=f"p50 {percentile(flooded, 0.5):.3f} after {percentile(quiet, 0.5):.3f}, {len(flooded)} samples",
        ),
        *cpu.figures("bad keys"),
    ]


class _Flood:
    """Calls with keys of no form, keys that nobody has, and the good key's prefix with another secret."""

    def __init__(self, good: Tenant, rng: random.Random) -> None:
        self.answers: Counter[grpc.StatusCode] = Counter()
        self._good = good
        self._rng = rng

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._call())
                await asyncio.sleep(self._rng.expovariate(_BAD_PER_S))

    def _key(self) -> str:
        forged = self._good.api_key[:-6] + f"{self._rng.getrandbits(24):06x}"
        return self._rng.choice(["sk-nothing", mint_api_key()[0], forged])

    async def _call(self) -> None:
        call: Any = self._good.stubs[0].ListModels(
            inference_pb2.ListModelsRequest(), metadata=(("authorization", f"Bearer {self._key()}"),), timeout=10
        )
        try:
            await call
            code = grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            code = error.code()
        self.answers[code] += 1
