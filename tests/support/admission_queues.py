"""Admission queues to test against, on every server there is, and short ways to make entries and rooms."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from scheduler.queue.memory import MemoryAdmissionQueue
from scheduler.queue.port import EnqueueStatus, Popped, QueueEntry, SessionRoom
from scheduler.queue.redis_queue import RedisAdmissionQueue
from scheduler.queue.settings import QueueSettings
from service_kit.ids import GenerationId, SessionId, TenantId, new_generation_id
from state_store.delta_log.connection import connect_redis
from state_store.model import ModelKey, PriorityClass
from tests.support.clock import SteppedClock
from tests.support.delta_logs import QUEUE_DATABASE, database_url

MODEL = ModelKey(revision="sha256:{ab}:1", precision="int8")
OTHER_MODEL = ModelKey(revision="sha256:cd", precision="int8")
ARRIVAL = datetime(2030, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)
SETTINGS = QueueSettings(
    max_requests=(3, 3, 3), max_prompt_tokens=(100, 100, 100), max_tenant_requests=4, max_tenant_prompt_tokens=150
)
ENOUGH = 1_000_000


@dataclass
class QueueUnderTest:
    queue: MemoryAdmissionQueue | RedisAdmissionQueue
    clock: SteppedClock

    async def lose_all(self) -> None:
        if isinstance(self.queue, MemoryAdmissionQueue):
            self.queue.lose_all()
        else:
            await self.queue._client.flushdb()

    async def add(self, *entries: QueueEntry, is_rebuild: bool = False) -> list[EnqueueStatus]:
        return await self.queue.enqueue_many(entries, is_rebuild=is_rebuild)

    async def pop(self, *rooms: SessionRoom, max_entries: int = 100, model_key: ModelKey = MODEL) -> list[Popped]:
        """Without rooms: into one with room for everything."""
        return await self.queue.pop(model_key, rooms or [room_of()], max_entries=max_entries)

    async def pop_entries(
        self, *rooms: SessionRoom, max_entries: int = 100, model_key: ModelKey = MODEL
    ) -> list[QueueEntry]:
        return [popped.entry for popped in await self.pop(*rooms, max_entries=max_entries, model_key=model_key)]

    async def contains(self, entry: QueueEntry) -> bool:
        return (await self.queue.contains_many([(entry.model_key, entry.generation_id, entry.attempt)]))[0]

    async def num_queued(self, model_key: ModelKey = MODEL) -> int:
        return (await self.queue.depth(model_key)).num_queued

    def advance(self, seconds: float) -> None:
        self.clock.advance(timedelta(seconds=seconds))


def memory_queue(settings: QueueSettings = SETTINGS) -> QueueUnderTest:
    clock = SteppedClock(ARRIVAL)
    return QueueUnderTest(MemoryAdmissionQueue(clock, settings), clock)


@asynccontextmanager
async def server_queue(url: str, settings: QueueSettings = SETTINGS) -> AsyncIterator[QueueUnderTest]:
    clock = SteppedClock(ARRIVAL)
    client = connect_redis(database_url(url, QUEUE_DATABASE))
    try:
        await client.flushdb()
        yield QueueUnderTest(RedisAdmissionQueue(client, settings, clock=clock), clock)
    finally:
        await client.aclose()


def entry_of(
    tenant: str = "tenant-é",
    *,
    arrived_ms: int = 0,
    order_ms: int | None = None,
    attempt: int = 0,
    prompt_tokens: int = 7,
    max_tokens: int = 10,
    weight: float = 1.0,
    priority_class: PriorityClass = PriorityClass.STANDARD,
    model_key: ModelKey = MODEL,
    deadline_at: datetime | None = None,
    ready_at: datetime | None = None,
    generation_id: GenerationId | None = None,
    is_charged: bool = False,
) -> QueueEntry:
    """Ordered by its arrival unless `order_ms` says otherwise."""
    return QueueEntry(
        generation_id=generation_id or new_generation_id(),
        attempt=attempt,
        model_key=model_key,
        tenant_id=TenantId(tenant),
        weight=weight,
        priority_class=priority_class,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        arrived_at=ARRIVAL + timedelta(milliseconds=arrived_ms),
        order_at=ARRIVAL + timedelta(milliseconds=arrived_ms if order_ms is None else order_ms),
        deadline_at=deadline_at,
        ready_at=ready_at,
        is_charged=is_charged,
    )


def room_of(
    tokens: int | Sequence[int] = ENOUGH,
    *,
    entries: int | Sequence[int] = 100,
    session: str = "session",
    capacity: int = ENOUGH,
    max_charged: int = 1,
) -> SessionRoom:
    """One number stands for all classes."""
    return SessionRoom(
        session_id=SessionId(session),
        max_entries=_by_class(entries),
        max_tokens=_by_class(tokens),
        capacity_tokens=capacity,
        max_charged=max_charged,
    )


def _by_class(numbers: int | Sequence[int]) -> tuple[int, int, int]:
    interactive, standard, batch = (numbers,) * 3 if isinstance(numbers, int) else numbers
    return interactive, standard, batch
