"""One client reads a token a second while its generation makes a hundred; fifty others read as fast as they can."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from bench.fairness.arena import Arena, Plan, Setting, TenantPlan, run
from bench.fairness.load import Ask, Tenant, background
from bench.figures import Figure
from inference.v1 import inference_pb2
from sluice.local.services import Service
from tests.support.processes import resident_bytes
from tests.support.stack import eventually

_STEP_S = 0.01
_NUM_FAST = 50
_BEHIND = 10_000
_ROUNDS = 3
_ROUND_S = 10.0
_SETTLE_S = 1.0
_WARM_UP_S = 5.0
_SAMPLE_S = 0.05
_MAX_GROWTH_MB = 20.0
_MIN_RATE = 95.0
_MAX_TOKENS = 40_000


def slow_reader(plan: Plan) -> Sequence[Figure]:
    setting = Setting(
        tenants=[TenantPlan(name="slow"), TenantPlan(name="fast")],
        slots=64,
        step_s=_STEP_S,
        num_blocks=32_768,
        context_length=2 * _MAX_TOKENS,
    )
    return run(setting, _slow_reader, plan)


async def _slow_reader(arena: Arena) -> Sequence[Figure]:
    slow, fast = arena.tenants["slow"], arena.tenants["fast"]
    memory = _Memory(arena)
    asks = [Ask(prompt=f"fast {n}", output_tokens=_MAX_TOKENS, grace_s=5) for n in range(_NUM_FAST)]
    generation_id = await _create(slow)
    with_slow: list[float] = []
    without: list[float] = []
    async with background(memory.watch()):
        reader = _SlowReader(slow, generation_id)
        await asyncio.sleep(arena.plan.seconds(_WARM_UP_S))
        memory.restart()
        async with background(reader.read()):
            await eventually(lambda: _has_made(slow, generation_id), what="far enough behind", timeout_s=600)
        alone_mb = memory.growth_mb
        async with background(*(_read(fast, ask) for ask in asks)):
            await asyncio.sleep(arena.plan.seconds(_WARM_UP_S))
            grown = []
            for _ in range(_ROUNDS):
                without.append(await _rate(fast, arena.plan.seconds(_ROUND_S)))
                memory.restart()
                async with background(reader.read()):
                    with_slow.append(await _rate(fast, arena.plan.seconds(_ROUND_S)))
                grown.append(memory.growth_mb)
    rate = 100 * sum(with_slow) / sum(without)
    name = f"a reader of 1 token/s, {_BEHIND} tokens behind"
    return [
        Figure(
            name=f"{name}: growth of the gateway's memory while it falls behind, MB",
            value=alone_mb,
            at_most=_MAX_GROWTH_MB,
            note=f"it read {reader.num_tokens} tokens",
        ),
        Figure(name=f"{name}: the same beside {_NUM_FAST} fast ones, MB", value=max(grown), at_most=_MAX_GROWTH_MB),
        Figure(
            name=f"{name}: tokens of the {_NUM_FAST} fast ones, share of those without it, %",
            value=rate,
            at_least=_MIN_RATE,
            note=f"{sum(without) / len(without):.0f} tokens/s without it, in turns",
        ),
    ]


class _Memory:
    """How much the gateway's process has grown."""

    def __init__(self, arena: Arena) -> None:
        (name,) = arena.stack.names(Service.GATEWAY)
        pid = arena.stack.local.services[name].pid
        assert pid is not None
        self._pid = pid
        self._least = self._most = resident_bytes(pid)

    def restart(self) -> None:
        self._least = self._most = resident_bytes(self._pid)

    @property
    def growth_mb(self) -> float:
        return (self._most - self._least) / 1e6

    async def watch(self) -> None:
        while True:
            self._most = max(self._most, resident_bytes(self._pid))
            await asyncio.sleep(_SAMPLE_S)


class _SlowReader:
    """Goes on where it stopped."""

    def __init__(self, tenant: Tenant, generation_id: str) -> None:
        self.num_tokens = 0
        self._tenant = tenant
        self._request = inference_pb2.StreamGenerationRequest()
        self._request.generation.generation_id = generation_id

    async def read(self) -> None:
        """Until cancelled. A message of many tokens is read for as many seconds."""
        async with _stream(self._tenant, self._request) as stream:
            while True:
                response = await stream.read()
                count = len(response.delta.token_ids)
                if count:
                    self.num_tokens += count
                    self._request.cursor.CopyFrom(response.delta.cursor)
                    await asyncio.sleep(count)


@asynccontextmanager
async def _stream(tenant: Tenant, request: inference_pb2.StreamGenerationRequest) -> AsyncIterator[Any]:
    stream: Any = tenant.stubs[0].StreamGeneration(request, metadata=tenant.metadata)
    try:
        yield stream
    finally:
        stream.cancel()


async def _create(tenant: Tenant) -> str:
    ask = Ask(prompt="slow", output_tokens=_MAX_TOKENS, grace_s=600).to_proto()
    request = inference_pb2.CreateGenerationRequest(spec=ask.spec, delivery=ask.delivery)
    response: Any = await tenant.stubs[0].CreateGeneration(request, metadata=tenant.metadata)
    return str(response.accepted.generation_id)


async def _has_made(tenant: Tenant, generation_id: str) -> bool:
    await asyncio.sleep(1.0)  # each question carries the whole output
    request = inference_pb2.GetGenerationRequest()
    request.generation.generation_id = generation_id
    response: Any = await tenant.stubs[0].GetGeneration(request, metadata=tenant.metadata)
    return response.generation.usage.output_tokens > _BEHIND


async def _read(tenant: Tenant, ask: Ask) -> None:
    await tenant.generate(ask, timeout_s=3600)


async def _rate(tenant: Tenant, for_s: float) -> float:
    """Tokens a second."""
    await asyncio.sleep(_SETTLE_S)
    began_s = time.monotonic()
    await asyncio.sleep(for_s)
    ended_s = time.monotonic()
    return tenant.served_between(began_s, ended_s) / (ended_s - began_s)
