"""A store is away, or comes back empty, while streams run, end and wait."""

import asyncio
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import grpc
from redis import Redis

from bench.fairness.arena import Arena, Plan, Setting, TenantPlan, run
from bench.fairness.load import Ask, Call, Tenant
from bench.figures import Figure
from tests.support.processes import send_to_tree
from tests.support.stack import RunningStack, eventually, simulated_output

_OUTAGE_S = 30.0
_BEFORE_S = 8.0
_NUM_LONG = 30
_SHORT_EVERY_S = 0.5
_ASK_EVERY_S = 0.1
_STEP_S = 0.02
_PATIENCE_S = 60.0
_REBUILD_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outage:
    name: str
    begin: Callable[[RunningStack], None]
    end: Callable[[RunningStack], None]


def _signal_postgres(stack: RunningStack, number: signal.Signals) -> None:
    pid = stack.local.postgres.pid
    assert pid is not None
    send_to_tree(pid, number)


_STOPPED = _Outage(
    name="Postgres stopped (SIGSTOP)",
    begin=lambda stack: _signal_postgres(stack, signal.SIGSTOP),
    end=lambda stack: _signal_postgres(stack, signal.SIGCONT),
)
_KILLED = _Outage(
    name="Postgres killed",
    begin=lambda stack: stack.local.postgres.kill(),
    end=lambda stack: stack.local.postgres.start(),
)


def postgres_stopped(plan: Plan) -> Sequence[Figure]:
    return run(_setting(slots=64), lambda arena: _postgres(arena, _STOPPED), plan)


def postgres_killed(plan: Plan) -> Sequence[Figure]:
    return run(_setting(slots=64), lambda arena: _postgres(arena, _KILLED), plan)


def redis_emptied(plan: Plan) -> Sequence[Figure]:
    """Most requests wait in the queue, and there only."""
    return run(_setting(slots=8), _redis, plan)


def _setting(*, slots: int) -> Setting:
    tenants = [TenantPlan(name=name) for name in ("load", "short", "new")]
    return Setting(
        tenants=tenants,
        slots=slots,
        step_s=_STEP_S,
        workers=2,
        gateways=2,
        schedulers=2,
        environment={"SLUICE_LOG_LEVEL": "INFO"},
    )


async def _postgres(arena: Arena, outage: _Outage) -> Sequence[Figure]:
    load, new = arena.tenants["load"], arena.tenants["new"]
    lasts_s = arena.plan.seconds(_OUTAGE_S)
    num_tokens = round((_BEFORE_S + lasts_s + 10) / _STEP_S)
    async with asyncio.TaskGroup() as tasks:
        calls = [
            tasks.create_task(load.generate(Ask(prompt=f"long {n}", output_tokens=num_tokens), gateway=n % 2))
            for n in range(_NUM_LONG)
        ]
        short = await _short_ones(tasks, arena.tenants["short"], for_s=_BEFORE_S)
        began_s = time.monotonic()
        outage.begin(arena.stack)
        try:
            asked = await _ask_until(new, began_s + lasts_s)
        finally:
            await asyncio.to_thread(outage.end, arena.stack)
        ended_s = time.monotonic()
        accepted_s = await _until_accepted(new)
    done = [task.result() for task in (*calls, *short)]
    before = load.served_between(began_s - _BEFORE_S / 2, began_s) / (_BEFORE_S / 2)
    during = load.served_between(began_s, ended_s) / (ended_s - began_s)
    refused = [call for call in asked if call.is_refused]
    rows = await arena.rows(
        "SELECT max(attempt) AS attempts, count(*) FILTER (WHERE attempt > 1) AS again FROM generations"
    )
    name = f"{outage.name} for {ended_s - began_s:.0f} s"
    return [
        Figure(
            name=f"{name}: slowest refusal of a new request, s",
            value=max(call.duration_s for call in refused),
            at_most=1.0,
            note=f"{len(refused)} of {len(asked)} asked",
        ),
        Figure(
            name=f"{name}: new requests not refused as UNAVAILABLE",
            value=sum(call.code is not grpc.StatusCode.UNAVAILABLE for call in asked),
            at_most=0,
        ),
        Figure(
            name=f"{name}: tokens of running streams, share of before, %",
            value=100 * during / before,
            at_least=90,
            note=f"{before:.0f} a second before",
        ),
        Figure(
            name=f"{name}: streams that did not end as an undisturbed one",
            value=sum(not _is_exact(call) for call in done),
            at_most=0,
            note=f"of {len(done)}",
        ),
        Figure(name=f"{name}: generations that were alive and requeued", value=rows[0]["again"], at_most=0),
        Figure(name=f"{name}: until a new request is accepted, s", value=accepted_s),
    ]


async def _short_ones(tasks: asyncio.TaskGroup, tenant: Tenant, *, for_s: float) -> list[asyncio.Task[Call]]:
    """Requests of 8 s, one after the other: many of them end while the store is away."""
    started: list[asyncio.Task[Call]] = []
    for n in range(round(for_s / _SHORT_EVERY_S)):
        ask = Ask(prompt=f"short {n}", output_tokens=round(_BEFORE_S / _STEP_S))
        started.append(tasks.create_task(tenant.generate(ask, gateway=n % 2)))
        await asyncio.sleep(_SHORT_EVERY_S)
    return started


async def _ask_until(tenant: Tenant, until_s: float) -> list[Call]:
    calls = []
    while time.monotonic() < until_s:
        ask = Ask(prompt="new", output_tokens=1, grace_s=0)
        calls.append(await tenant.generate(ask, gateway=len(calls) % 2, timeout_s=20))
        await asyncio.sleep(_ASK_EVERY_S)
    # One that was under way when the store came back may be answered.
    return [call for call in calls if call.ended_s is not None and call.ended_s < until_s]


async def _until_accepted(tenant: Tenant) -> float:
    began_s = time.monotonic()
    async with asyncio.timeout(_PATIENCE_S):
        while True:
            call = await tenant.generate(Ask(prompt="again", output_tokens=1))
            if call.accepted_s is not None:
                return call.accepted_s - began_s
            await asyncio.sleep(_ASK_EVERY_S)


def _is_exact(call: Call) -> bool:
    expected = simulated_output(call.ask.prompt, seed=1, count=call.ask.output_tokens)
    return call.is_whole and call.text == "".join(map(chr, expected))


async def _redis(arena: Arena) -> Sequence[Figure]:
    load, new = arena.tenants["load"], arena.tenants["new"]
    count = arena.plan.count(160)
    async with asyncio.TaskGroup() as tasks:
        calls = [
            tasks.create_task(load.generate(Ask(prompt=f"load {n}", output_tokens=60), gateway=n % 2))
            for n in range(count)
        ]

        async def all_accepted() -> bool:
            return sum(call.accepted_s is not None for call in load.calls) == count

        await eventually(all_accepted, what="all are accepted")
        queued = (await arena.rows("SELECT count(*) AS n FROM generations WHERE state = 'QUEUED'"))[0]["n"]
        num_lines = len(arena.stack.lines)
        began_s = time.monotonic()
        await asyncio.to_thread(_flush_all, arena.stack.local.valkey.url)
        accepting = tasks.create_task(_until_accepted(new))
        rebuilt_s = await _until_rebuilt(arena.stack, num_lines) - began_s
        accepted_s = await accepting
    done = [task.result() for task in calls]
    rows = await arena.rows("SELECT count(*) AS n FROM generations WHERE state NOT IN ('SUCCEEDED')")
    attempts = await arena.rows("SELECT count(*) AS n FROM generations WHERE attempt > 1")
    name = "Redis emptied"
    return [
        Figure(
            name=f"{name}: until the queues are rebuilt, s",
            value=rebuilt_s,
            at_most=_REBUILD_S,
            note=f"{queued} waited, {count - queued} ran or had ended",
        ),
        Figure(name=f"{name}: until a new request is accepted, s", value=accepted_s, at_most=_REBUILD_S),
        Figure(
            name=f"{name}: streams that did not end as an undisturbed one",
            value=sum(not _is_exact(call) for call in done),
            at_most=0,
            note=f"of {count}",
        ),
        Figure(name=f"{name}: DATA_LOSS", value=_count(done, grpc.StatusCode.DATA_LOSS), at_most=0),
        Figure(name=f"{name}: accepted and not succeeded", value=rows[0]["n"], at_most=0),
        Figure(name=f"{name}: generations that were alive and requeued", value=attempts[0]["n"], at_most=0),
    ]


def _count(calls: Sequence[Call], code: grpc.StatusCode) -> int:
    return sum(call.code is code for call in calls)


def _flush_all(url: str) -> None:
    with Redis.from_url(url) as redis:
        redis.flushall()


async def _until_rebuilt(stack: RunningStack, num_lines: int) -> float:
    """When a scheduler has said so."""

    async def is_rebuilt() -> bool:
        return any("queue_rebuilt" in line for line in _texts(stack, num_lines))

    await eventually(is_rebuilt, what="the queues are rebuilt")
    return time.monotonic()


def _texts(stack: RunningStack, since: int) -> Iterator[str]:
    return (text for _, text in stack.lines[since:])
