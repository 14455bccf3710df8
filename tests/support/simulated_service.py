"""Sessions that serve the memory queue in simulated time: one step is 20 ms, in which each running request makes a token."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from scheduler.queue.memory import MemoryAdmissionQueue
from scheduler.queue.port import OutputCharge, QueueEntry, SessionRoom
from service_kit.ids import GenerationId, SessionId
from tests.support.admission_queues import MODEL, entry_of
from tests.support.clock import SteppedClock

STEP = timedelta(milliseconds=20)


@dataclass
class Session:
    """`running` has the output tokens that each entry has still to make."""

    name: str
    num_slots: int
    capacity_tokens: int = 1_000_000
    running: list[tuple[QueueEntry, int]] = field(default_factory=list)

    def room(self) -> SessionRoom:
        num_free = self.num_slots - len(self.running)
        tokens = self.capacity_tokens - sum(entry.max_tokens for entry, _ in self.running)
        return SessionRoom(
            session_id=SessionId(self.name),
            max_entries=(num_free, num_free, num_free),
            max_tokens=(tokens, tokens, tokens),
            capacity_tokens=self.capacity_tokens,
        )


@dataclass
class Backlog:
    """A tenant that keeps `depth` requests queued."""

    tenant: str
    depth: int
    output_tokens: int
    changes: dict[str, Any] = field(default_factory=dict)


class SimulatedService:
    """Owner of the simulated time. `served` are tokens by tenant, prompts and output; `started_at` is simulated seconds."""

    def __init__(self, *sessions: Session) -> None:
        self.clock = SteppedClock()
        self.queue = MemoryAdmissionQueue(self.clock)
        self.sessions = sessions
        self.backlogs: list[Backlog] = []
        self.served: Counter[str] = Counter()
        self.num_started: Counter[str] = Counter()
        self.num_finished: Counter[str] = Counter()
        self.started_at_s: dict[GenerationId, float] = {}
        self.now_s = 0.0
        self._output_tokens: dict[GenerationId, int] = {}
        self._num_queued: Counter[str] = Counter()

    async def submit(self, tenant: str, output_tokens: int, **changes: Any) -> QueueEntry:
        now = self.clock()
        entry = replace(entry_of(tenant, **changes), arrived_at=now, order_at=now)
        self._output_tokens[entry.generation_id] = output_tokens
        self._num_queued[tenant] += 1
        await self.queue.enqueue_many([entry])
        return entry

    async def run(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP.total_seconds())):
            for backlog in self.backlogs:
                while self._num_queued[backlog.tenant] < backlog.depth:
                    await self.submit(backlog.tenant, backlog.output_tokens, **backlog.changes)
            await self._dispatch()
            await self._make_tokens()
            self.clock.advance(STEP)
            self.now_s += STEP.total_seconds()

    async def _dispatch(self) -> None:
        by_name = {session.name: session for session in self.sessions}
        popped = await self.queue.pop(MODEL, [session.room() for session in self.sessions], max_entries=64)
        for pop in popped:
            entry = pop.entry
            by_name[pop.session_id].running.append((entry, self._output_tokens[entry.generation_id]))
            self.served[entry.tenant_id] += entry.prompt_tokens
            self.num_started[entry.tenant_id] += 1
            self._num_queued[entry.tenant_id] -= 1
            self.started_at_s[entry.generation_id] = self.now_s
        await self.queue.ack_many(popped)

    async def _make_tokens(self) -> None:
        weights: dict[str, float] = {}
        tokens: defaultdict[str, int] = defaultdict(int)
        for session in self.sessions:
            for entry, _ in session.running:
                weights[entry.tenant_id] = entry.weight
                tokens[entry.tenant_id] += 1
            made = [(entry, left - 1) for entry, left in session.running]
            session.running = [(entry, left) for entry, left in made if left]
            self.num_finished.update(entry.tenant_id for entry, left in made if not left)
        self.served.update(tokens)
        await self.queue.charge_many(_charges(tokens, weights))


def _charges(tokens: dict[str, int], weights: dict[str, float]) -> Sequence[OutputCharge]:
    return [
        OutputCharge(model_key=MODEL, tenant_id=entry_of(tenant).tenant_id, weight=weights[tenant], tokens=number)
        for tenant, number in tokens.items()
    ]
