"""Many streams come back with their cursors, as after the loss of a gateway."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from bench.fairness.arena import Arena, Plan, Setting, TenantPlan, run
from bench.fairness.load import Ask, Tenant
from bench.figures import Figure, percentile
from inference.v1 import inference_pb2
from service_kit.delta import EMPTY_CHAIN, extend_chain
from sluice.local.services import Service
from tests.support.processes import send_to_tree
from tests.support.stack import eventually, simulated_output

_NUM_STREAMS = 1000
_PER_S = 100.0
_WORKERS = 8
_STEP_S = 1.0
_KNOWN_TOKENS = 20
"""Every generation has made so many when the streams come back; cursors are drawn below."""
_MAX_TOKENS = 2000
_MAX_RATIO = 3.0
_MAX_FIRST_MS = 100.0
_CREATING = 32


def reconnects(plan: Plan) -> Sequence[Figure]:
    setting = Setting(
        tenants=[TenantPlan(name="readers")],
        slots=_NUM_STREAMS // _WORKERS + 10,
        step_s=_STEP_S,
        num_blocks=8192,
        workers=_WORKERS,
    )
    return run(setting, _reconnects, plan)


async def _reconnects(arena: Arena) -> Sequence[Figure]:
    tenant = arena.tenants["readers"]
    asks = [Ask(prompt=f"stream {n}", output_tokens=_MAX_TOKENS, grace_s=600) for n in range(_NUM_STREAMS)]
    turns = asyncio.Semaphore(_CREATING)
    ids = await asyncio.gather(*(_create(tenant, ask, turns) for ask in asks))
    await eventually(lambda: _have_tokens(tenant, ids), what="all have made some tokens", timeout_s=180)
    await _out_of_step(arena)
    cursors = [_cursor(ask.prompt, arena.rng.randrange(_KNOWN_TOKENS)) for ask in asks]
    arena.cpu.restart()
    unary_ms: list[float] = []
    first_ms: list[float] = []
    delta_ms: list[float] = []
    async with asyncio.TaskGroup() as tasks:
        streams = []
        begin_s = time.monotonic()
        for number, (generation_id, cursor) in enumerate(zip(ids, cursors, strict=True)):
            await asyncio.sleep(max(0.0, begin_s + number / _PER_S - time.monotonic()))
            streams.append(tasks.create_task(_read(tenant, generation_id, cursor, first_ms, delta_ms)))
            tasks.create_task(_call(tenant, unary_ms))
        shares = arena.cpu.shares()
        await eventually(lambda: _all_heard(delta_ms), what="every stream goes on")
        for stream in streams:
            stream.cancel()
    unary, first, delta = (percentile(values, 0.99) for values in (unary_ms, first_ms, delta_ms))
    medians = [percentile(values, 0.5) for values in (unary_ms, first_ms, delta_ms)]
    name = f"{_NUM_STREAMS} streams come back, {_PER_S:g} a second"
    note = "median {:.1f} ms".format
    return [
        Figure(name=f"{name}: bare unary call beside them, p99, ms", value=unary, note=note(medians[0])),
        Figure(name=f"{name}: first message, p99, ms", value=first, at_most=_MAX_FIRST_MS, note=note(medians[1])),
        Figure(name=f"{name}: first message, p99, times that of the call", value=first / unary, at_most=_MAX_RATIO),
        Figure(name=f"{name}: first token, p99, ms", value=delta, note=note(medians[2])),
        *shares.figures(name),
    ]


async def _out_of_step(arena: Arena) -> None:
    """Engines that began together take their steps together, which workers on machines of their own do not: each is held up
    for a whole step and another part of one."""
    pids = [arena.stack.local.services[name].pid for name in arena.stack.names(Service.GPU_WORKER)]
    running = [pid for pid in pids if pid is not None]
    for pid in running:
        send_to_tree(pid, signal.SIGSTOP)
    await asyncio.sleep(_STEP_S)
    for pid in running:
        await asyncio.sleep(_STEP_S / _WORKERS)
        send_to_tree(pid, signal.SIGCONT)
    await asyncio.sleep(2 * _STEP_S)


async def _create(tenant: Tenant, ask: Ask, turns: asyncio.Semaphore) -> str:
    generate = ask.to_proto()
    request = inference_pb2.CreateGenerationRequest(spec=generate.spec, delivery=generate.delivery)
    async with turns:
        response: Any = await tenant.stubs[0].CreateGeneration(request, metadata=tenant.metadata)
    return str(response.accepted.generation_id)


async def _have_tokens(tenant: Tenant, ids: Sequence[str]) -> bool:
    """Whether the youngest has."""
    request = inference_pb2.GetGenerationRequest()
    request.generation.generation_id = max(ids)
    response: Any = await tenant.stubs[0].GetGeneration(request, metadata=tenant.metadata)
    return response.generation.usage.output_tokens > _KNOWN_TOKENS


def _cursor(prompt: str, number: int) -> inference_pb2.StreamGenerationRequest:
    request = inference_pb2.StreamGenerationRequest()
    request.cursor.sequence_number = number
    request.cursor.chain = extend_chain(EMPTY_CHAIN, simulated_output(prompt, seed=1, count=number))
    return request


async def _read(
    tenant: Tenant,
    generation_id: str,
    request: inference_pb2.StreamGenerationRequest,
    first_ms: list[float],
    delta_ms: list[float],
) -> None:
    """Until it is cancelled."""
    request.generation.generation_id = generation_id
    began_s = time.monotonic()
    stream: Any = tenant.stubs[0].StreamGeneration(request, metadata=tenant.metadata)
    with contextlib.closing(_Cancelled(stream)):
        await stream.read()
        first_ms.append(1000 * (time.monotonic() - began_s))
        response = await stream.read()
        delta_ms.append(1000 * (time.monotonic() - began_s))
        if response.delta.cursor.sequence_number <= request.cursor.sequence_number:
            raise RuntimeError("the stream does not continue its cursor")
        while (await stream.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            pass


class _Cancelled:
    """Cancels a stream when it is closed."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def close(self) -> None:
        self._stream.cancel()


async def _call(tenant: Tenant, unary_ms: list[float]) -> None:
    """The key is checked and the store is read once."""
    began_s = time.monotonic()
    await tenant.stubs[0].ListModels(inference_pb2.ListModelsRequest(), metadata=tenant.metadata)
    unary_ms.append(1000 * (time.monotonic() - began_s))


async def _all_heard(delta_ms: Sequence[float]) -> bool:
    return len(delta_ms) == _NUM_STREAMS
