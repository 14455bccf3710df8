"""Does to a running stack what a fault plan says, and undoes it again."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

from redis import Redis

from tests.chaos.database import Connection, connect, fetch, old_transactions
from tests.chaos.plan import FaultKind, FaultPlan
from tests.chaos.stack import ChaosStack
from tests.chaos.waiting import until

_BUFFERED_S = 0.15
"""How long a paused scheduler is sent news that it does not read."""

NO_TAKEOVER = "no other scheduler could take over from"

Note = Callable[[str], None]


class Faults:
    """One fault of one trial. `note` hears what was done."""

    def __init__(self, stack: ChaosStack, plan: FaultPlan, note: Note) -> None:
        self._stack = stack
        self._plan = plan
        self._note = note

    async def run(self) -> None:
        """Returns when the fault is over; what it killed may still be starting."""
        actions: dict[FaultKind, Callable[[], Awaitable[None]]] = {
            FaultKind.KILL: self._kill,
            FaultKind.KILL_ALL: self._kill_all,
            FaultKind.PAUSE: self._pause,
            FaultKind.CUT: self._cut,
            FaultKind.BLACKHOLE: self._blackhole,
            FaultKind.RESTART: self._restart,
            FaultKind.VALKEY_CUT: self._valkey_cut,
            FaultKind.FLUSH: self._flush,
            FaultKind.POSTGRES_KILL: self._postgres_kill,
            FaultKind.FLUSH_AND_KILL: self._flush_and_kill,
            FaultKind.LATE_APPEND: self._late_append,
            FaultKind.DEPOSED_GRANT: self._deposed_grant,
            FaultKind.POSTGRES_STOP: self._postgres_stop,
            FaultKind.POSTGRES_RESTART: self._postgres_restart,
            FaultKind.VALKEY_RESTART: self._valkey_restart,
            FaultKind.FLUSH_UNSEEN: self._flush_unseen,
            FaultKind.STORES_KILL: self._stores_kill,
        }
        await asyncio.sleep(self._plan.at_s)
        self._note(f"{self._plan.kind} {self._plan}")
        await actions[self._plan.kind]()
        self._note("over")

    async def _kill(self) -> None:
        for name in self._plan.targets:
            await self._stack.kill(name)
        await asyncio.sleep(self._plan.down_s)
        for name in self._plan.targets:
            await self._stack.start_process(name)

    async def _kill_all(self) -> None:
        await self._stack.kill_all()
        await asyncio.sleep(self._plan.down_s)
        await self._stack.heal()

    async def _pause(self) -> None:
        for name in self._plan.targets:
            self._stack.send_signal(name, signal.SIGSTOP, is_group=self._plan.is_group)
        await asyncio.sleep(self._plan.lasts_s)
        for name in self._plan.targets:
            self._stack.send_signal(name, signal.SIGCONT, is_group=True)

    async def _cut(self) -> None:
        links = [link for prefix in self._plan.links for link in self._stack.find_links(prefix)]
        self._note(f"cuts {sum(link.num_connections for link in links)} connections")
        for link in links:
            link.cut()

    async def _blackhole(self) -> None:
        links = [link for prefix in self._plan.links for link in self._stack.find_links(prefix)]
        for link in links:
            link.hold()
        await asyncio.sleep(self._plan.lasts_s)
        for link in links:
            link.release()

    async def _restart(self) -> None:
        for name in self._plan.targets:
            await self._stack.terminate(name)
            await self._stack.start_process(name)

    async def _valkey_cut(self) -> None:
        await self._cut_file()
        await asyncio.sleep(self._plan.down_s)
        await self._stack.run(self._stack.valkey.start)

    async def _cut_file(self) -> None:
        await self._stack.run(self._stack.valkey.kill)
        taken = self._stack.append_only.cut_back(self._plan.cut_s, now_s=time.monotonic())
        self._note(f"cut {taken} bytes ({self._plan.cut_s:.1f} s) off the append-only file")

    async def _flush(self) -> None:
        await asyncio.to_thread(_flush_all, self._stack.valkey.url)

    async def _postgres_kill(self) -> None:
        await self._stack.run(self._stack.postgres.kill)
        await asyncio.sleep(self._plan.down_s)
        await self._stack.run(self._stack.postgres.start)

    async def _postgres_stop(self) -> None:
        self._stack.signal_postgres(signal.SIGSTOP)
        await self._outage()
        self._stack.signal_postgres(signal.SIGCONT)

    async def _postgres_restart(self) -> None:
        await self._stack.run(self._stack.postgres.stop)
        await self._outage()
        await self._stack.run(self._stack.postgres.start)

    async def _valkey_restart(self) -> None:
        valkey = self._stack.valkey
        await self._stack.run(valkey.stop if self._plan.is_orderly else valkey.kill)
        await self._outage()
        await self._stack.run(valkey.start)

    async def _outage(self) -> None:
        """A store is away; what is to be killed dies in the middle of it and is back before the store."""
        await asyncio.sleep(self._plan.lasts_s / 2)
        await self._kill()
        await asyncio.sleep(self._plan.lasts_s / 2)

    async def _flush_unseen(self) -> None:
        self._stack.signal_postgres(signal.SIGSTOP)
        await asyncio.sleep(self._plan.lasts_s / 2)
        await self._flush()
        await asyncio.sleep(self._plan.lasts_s / 2)
        self._stack.signal_postgres(signal.SIGCONT)

    async def _stores_kill(self) -> None:
        await self._stack.run(self._stack.postgres.kill)
        await self._cut_file()
        await asyncio.sleep(self._plan.down_s)
        await self._stack.run(self._stack.postgres.start)
        await self._stack.run(self._stack.valkey.start)

    async def _flush_and_kill(self) -> None:
        for name in self._plan.targets:
            await self._stack.kill(name)
        if self._plan.is_flush:
            await self._flush()
        else:
            await self._cut_file()
            await self._stack.run(self._stack.valkey.start)
        for name in self._plan.targets:
            await self._stack.start_process(name)

    async def _late_append(self) -> None:
        """A scheduler stops reading, its worker goes on for a moment and then stops as well; the other scheduler finds the
        lease over and grants another attempt. At that moment the first one goes on, with the old attempt's news."""
        async with connect(self._stack.dsn) as connection:
            busiest = await _busiest_session(connection)
            if busiest is None:
                self._note("nothing runs")
                return
            owner, worker = busiest["scheduler_id"], self._stack.worker_at(busiest["address"])
            self._stack.send_signal(owner, signal.SIGSTOP)
            await asyncio.sleep(_BUFFERED_S)
            self._stack.send_signal(worker, signal.SIGSTOP, is_group=True)
            self._note(f"{owner} and {worker} stopped")
            session_id = busiest["session_id"]
            granted = await until(lambda: _is_granted_again(connection, session_id), self._plan.lasts_s)
            if not granted:
                held = await old_transactions(connection, 3.0)
                self._note(f"{NO_TAKEOVER} {owner} within {self._plan.lasts_s:g} s; open transactions: {held}")
            self._stack.send_signal(owner, signal.SIGCONT)
            self._note(f"{owner} goes on; granted again: {granted}")
        await asyncio.sleep(self._plan.down_s)
        self._stack.send_signal(worker, signal.SIGCONT, is_group=True)

    async def _deposed_grant(self) -> None:
        """What passes over the worker's present connections is held up; the worker hears nothing and finds another
        scheduler, over a new connection."""
        links = [link for name in self._plan.targets for link in self._stack.find_links(f"schedulers->{name}")]
        for link in links:
            link.hold(holds_new=False)
        await asyncio.sleep(self._plan.lasts_s)
        for link in links:
            link.release()


async def _busiest_session(connection: Connection) -> dict[str, Any] | None:
    """The live session that runs most, with its owner."""
    query = (
        "SELECT s.session_id, s.scheduler_id, s.address FROM worker_sessions s JOIN generations g USING (session_id)"
        " WHERE s.state = 'LIVE' AND g.state = 'RUNNING' GROUP BY 1, 2, 3 ORDER BY count(*) DESC LIMIT 1"
    )
    return next(iter(await fetch(connection, query)), None)


async def _is_granted_again(connection: Connection, session_id: str) -> bool:
    query = (
        "SELECT 1 FROM attempts a JOIN generations g ON g.generation_id = a.generation_id AND g.attempt > a.attempt"
        " WHERE a.session_id = %s AND g.state = 'RUNNING' LIMIT 1"
    )
    return bool(await fetch(connection, query, session_id))


def _flush_all(url: str) -> None:
    with Redis.from_url(url) as redis:
        redis.flushall()
