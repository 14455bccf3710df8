"""How long a stream pauses when a process dies or hangs: `python -m bench.recovery` (or `make bench-recovery`).

The whole service as OS processes with the simulated engine, default leases: 2 gateways, 2 schedulers, 2 workers. A trial
starts several streams, hurts one process at a random moment, and measures at the client, for every stream that the process
served, the time from the fault to the next token behind the pause. The slowest stream of a trial is its value. Every token
is compared with what an undisturbed stream says.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import dict_row

from bench.figures import Figure, percentile, report
from bench.recovery_streams import WatchedStream
from sluice.client import SluiceClient
from sluice.local.services import Service
from tests.support.stack import RunningStack, eventually, running_stack

LEASE_S = 5.0
"""The default of SLUICE_LEASE_S."""
TOKENS_PER_S = 50.0
PREFILL_TOKENS_PER_S = 5000.0
NUM_STREAMS = 6
PROMPT_TOKENS = 200
TOKENS_BEFORE_FAULT = 5
PATIENCE_S = 60.0
_COUNTS = {Service.SCHEDULER: 2, Service.GPU_WORKER: 2, Service.GATEWAY: 2}
_LIVE = "SELECT address FROM worker_sessions WHERE state = 'LIVE'"
_STATE = """
SELECT generation_id::text, attempt, session_id, address, owner_epoch
FROM generations LEFT JOIN worker_sessions USING (session_id) WHERE generation_id = ANY(%s::uuid[])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is done to which process. `at_most_s` limits the median, `counts_prefill` adds what another worker computes
    again; `share` of the trials are made with it."""

    name: str
    service: Service | None
    hurt: Callable[[RunningStack, str], None]
    at_most_s: float | None
    counts_prefill: bool = False
    share: float = 1.0


def _restart_everything(stack: RunningStack, _name: str) -> None:
    """A power cut of all processes, and their start; the start counts."""
    stack.local.kill()
    stack.local.postgres.start()
    stack.local.valkey.start()
    for name in stack.local.services:
        stack.local.start_service(name)


FAULTS = {
    "worker-killed": Fault(
        name="worker killed (SIGKILL), another one present",
        service=Service.GPU_WORKER,
        hurt=RunningStack.kill,
        at_most_s=1.5,
        counts_prefill=True,
    ),
    "worker-hung": Fault(
        name="worker hung (SIGSTOP), another one present",
        service=Service.GPU_WORKER,
        hurt=RunningStack.pause,
        at_most_s=LEASE_S + 1.5,
    ),
    "scheduler-killed": Fault(
        name="scheduler killed (SIGKILL), another one present",
        service=Service.SCHEDULER,
        hurt=RunningStack.kill,
        at_most_s=3.0,
    ),
    "scheduler-hung": Fault(
        name="scheduler hung (SIGSTOP), another one present",
        service=Service.SCHEDULER,
        hurt=RunningStack.pause,
        at_most_s=5.0,
    ),
    "all-killed": Fault(
        name="every process killed and started again",
        service=None,
        hurt=_restart_everything,
        at_most_s=None,
        share=0.2,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """`pauses_s` of the streams that the hurt process served; `prefill_s` is what another worker computed again for them."""

    pauses_s: tuple[float, ...]
    prefill_s: float

    @property
    def slowest_s(self) -> float:
        return max(self.pauses_s)


class Bench:
    """One stack, kept over all trials."""

    def __init__(self, stack: RunningStack, clients: Sequence[SluiceClient], rng: random.Random) -> None:
        self._stack = stack
        self._clients = clients
        self._rng = rng
        self._num_streams = 0

    async def run(self, fault: Fault) -> Trial:
        """Raises TimeoutError or AssertionError when the streams or the stack do not come back."""
        await self._stack.heal()
        await eventually(self._is_whole, what="both workers have one live session each")
        streams = [self._start_stream() for _ in range(NUM_STREAMS)]
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(stream.until_tokens(TOKENS_BEFORE_FAULT) for stream in streams))
        await asyncio.sleep(self._rng.random())  # faults know nothing of the beats of leases and heartbeats
        before = await asyncio.to_thread(self._state, streams)
        servers = {generation_id: self._server_of(fault.service, row) for generation_id, row in before.items()}
        victim = statistics.mode(servers.values())  # the process that serves most of the streams
        affected = [stream for stream in streams if servers[stream.generation_id] == victim]
        fault_s = time.monotonic()
        fault.hurt(self._stack, victim)
        async with asyncio.timeout(PATIENCE_S):
            await self._until_moved(affected, before, is_takeover=fault.service is Service.SCHEDULER)
            moved_s = time.monotonic()
            await asyncio.gather(*(stream.until_arrival_after(moved_s) for stream in affected))
        trial = Trial(
            pauses_s=tuple(stream.resumed_after_s(fault_s) for stream in affected),
            prefill_s=sum(stream.num_context_tokens for stream in affected) / PREFILL_TOKENS_PER_S,
        )
        await asyncio.gather(*(stream.end() for stream in streams))
        for stream in streams:
            stream.check()
        return trial

    def _start_stream(self) -> WatchedStream:
        self._num_streams += 1
        prompt = f"stream {self._num_streams} ".ljust(PROMPT_TOKENS - 1, "x")
        return WatchedStream(self._clients[self._num_streams % len(self._clients)], prompt)

    async def _is_whole(self) -> bool:
        """Exactly one live session per worker."""
        with psycopg.connect(self._stack.local.dsn) as connection:
            rows = connection.execute(_LIVE).fetchall()
        workers = [i.address for i in self._stack.local.instances if i.service is Service.GPU_WORKER]
        return sorted(address for (address,) in rows) == sorted(workers)

    def _state(self, streams: Sequence[WatchedStream]) -> dict[str, dict[str, Any]]:
        with psycopg.connect(self._stack.local.dsn, row_factory=dict_row) as connection:
            rows = connection.execute(_STATE, ([stream.generation_id for stream in streams],)).fetchall()
        return {row["generation_id"]: row for row in rows}

    def _server_of(self, service: Service | None, row: dict[str, Any]) -> str:
        """Name of the process; every stream's is the same where all processes are hurt. Which scheduler owns a session
        is known by what it logged."""
        if service is None:
            return ""
        if service is Service.GPU_WORKER:
            return next(i.name for i in self._stack.local.instances if i.address == row["address"])
        lines = reversed(self._stack.lines)
        return next(name for name, line in lines if "session_opened" in line and row["session_id"] in line)

    async def _until_moved(
        self, streams: Sequence[WatchedStream], before: dict[str, dict[str, Any]], *, is_takeover: bool
    ) -> None:
        """Until the durable record says that another process serves them."""
        key = "owner_epoch" if is_takeover else "attempt"

        async def is_moved() -> bool:
            try:
                now = await asyncio.to_thread(self._state, streams)
            except psycopg.OperationalError:
                return False
            return all(row["session_id"] and row[key] > before[id_][key] for id_, row in now.items())

        await eventually(is_moved, what="another process serves the streams")


def figures_of(fault: Fault, trials: Sequence[Trial]) -> Iterator[Figure]:
    slowest = [trial.slowest_s for trial in trials]
    prefill_s = statistics.median(trial.prefill_s for trial in trials) if fault.counts_prefill else 0.0
    note = f"{len(trials)} trials, {sum(len(trial.pauses_s) for trial in trials)} streams"
    if prefill_s:
        note += f"; {prefill_s:.2f} s of the limit are computed again"
    limit = None if fault.at_most_s is None else round(fault.at_most_s + prefill_s, 3)
    yield Figure(name=f"{fault.name}: median, s", value=statistics.median(slowest), at_most=limit, note=note)
    spread = f"from {min(slowest):.2f} to {max(slowest):.2f} s"
    yield Figure(name=f"{fault.name}: p95, s", value=percentile(slowest, 0.95), note=spread)


async def measure(stack: RunningStack, names: Sequence[str], num_trials: int, seed: int) -> dict[str, list[Trial]]:
    """Trials by fault. Clients begin at different gateways."""
    rng = random.Random(seed)  # noqa: S311
    gateways = tuple(stack.local.gateways)
    results: dict[str, list[Trial]] = {}
    async with AsyncExitStack() as exits:
        clients = [
            await exits.enter_async_context(stack.client(targets=(*gateways[turn:], *gateways[:turn])))
            for turn in range(len(gateways))
        ]
        bench = Bench(stack, clients, rng)
        for name in names:
            results[name] = []
            for number in range(max(1, round(num_trials * FAULTS[name].share))):
                trial = await bench.run(FAULTS[name])
                results[name].append(trial)
                pauses = " ".join(f"{pause_s:.2f}" for pause_s in sorted(trial.pauses_s))
                print(f"  {name} {number + 1}: {pauses}", file=sys.stderr, flush=True)
    return results


def write_json(path: Path, results: dict[str, list[Trial]], figures: Sequence[Figure]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "figures": [
            {"name": f.name, "value": f.value, "at_most": f.at_most, "is_kept": f.is_kept, "note": f.note}
            for f in figures
        ],
        "trials": {
            name: [{"pauses_s": t.pauses_s, "prefill_s": t.prefill_s} for t in trials]
            for name, trials in results.items()
        },
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=30, help="of each fault")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--json", type=Path, default=Path("build/recovery.json"))
    parser.add_argument("--logs", type=Path, help="where to leave the logs of all processes")
    arguments = parser.parse_args()
    settings = {"prefill_tokens_per_s": PREFILL_TOKENS_PER_S}
    with running_stack(tokens_per_s=TOKENS_PER_S, counts=_COUNTS, engine_settings=settings) as stack:
        try:
            results = asyncio.run(measure(stack, arguments.faults, arguments.trials, arguments.seed))
        finally:
            if arguments.logs is not None:
                arguments.logs.mkdir(parents=True, exist_ok=True)
                for log in stack.home.logs.glob("*.log"):
                    (arguments.logs / log.name).write_bytes(log.read_bytes())
    figures = [figure for name, trials in results.items() for figure in figures_of(FAULTS[name], trials)]
    write_json(arguments.json, results, figures)
    status = report(figures)
    print(f"all trials: {arguments.json}")
    return status


if __name__ == "__main__":
    sys.exit(main())
