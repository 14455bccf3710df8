"""Delta logs to test against, and a way to see all pushes up to a point without waiting for silence."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from service_kit.delta import Cursor, Delta, make_delta
from service_kit.ids import GatewayId, GenerationId, new_generation_id
from service_kit.sampling import FinishReason
from state_store.delta_log.connection import connect_redis
from state_store.delta_log.memory import MemoryDeltaLog
from state_store.delta_log.port import (
    AppendItem,
    AppendResult,
    AppendStatus,
    LogEnd,
    LogView,
    OpenItem,
    OpenResult,
    Push,
    SealItem,
)
from state_store.delta_log.redis_log import RedisDeltaLog
from state_store.model import State
from tests.support.clock import SteppedClock

LOG_DATABASE = 5
QUEUE_DATABASE = 6

SUCCEEDED = LogEnd(
    state=State.SUCCEEDED,
    output_tokens=3,
    prompt_tokens=7,
    cached_prompt_tokens=4,
    finish_reason=FinishReason.STOP,
    matched_stop="¡fin!",
)
FAILED = LogEnd(
    state=State.FAILED,
    output_tokens=0,
    prompt_tokens=7,
    cached_prompt_tokens=0,
    error_reason="ATTEMPTS_EXHAUSTED",
    error_message="three workers died",
)


def database_url(url: str, database: int) -> str:
    return f"{url.rsplit('/', 1)[0]}/{database}"


@dataclass
class LogUnderTest:
    log: MemoryDeltaLog | RedisDeltaLog
    clock: SteppedClock

    async def lose_all(self) -> None:
        if isinstance(self.log, MemoryDeltaLog):
            self.log.lose_all()
        else:
            await self.log._client.flushdb()

    async def open(self, generation_id: GenerationId, attempt: int, base: Cursor = Cursor()) -> OpenResult:
        (result,) = await self.log.open_many([OpenItem(generation_id=generation_id, attempt=attempt, base=base)])
        return result

    async def append(self, generation_id: GenerationId, attempt: int, delta: Delta) -> AppendResult:
        item = AppendItem(generation_id=generation_id, attempt=attempt, delta=delta)
        (result,) = await self.log.append_many([item])
        return result

    async def status(self, generation_id: GenerationId, attempt: int, delta: Delta) -> AppendStatus:
        return (await self.append(generation_id, attempt, delta)).status

    async def seal(self, generation_id: GenerationId, attempt: int, terminal: LogEnd | None = None) -> LogView:
        item = SealItem(generation_id=generation_id, attempt=attempt, terminal=terminal)
        (view,) = await self.log.seal_many([item])
        return view

    async def read(self, generation_id: GenerationId, after: int = 0) -> LogView:
        (view,) = await self.log.read_many([(generation_id, after)])
        return view


def memory_log() -> LogUnderTest:
    clock = SteppedClock()
    return LogUnderTest(MemoryDeltaLog(clock), clock)


@asynccontextmanager
async def valkey_log(url: str, num_shards: int = 1) -> AsyncIterator[LogUnderTest]:
    clock = SteppedClock()
    client = connect_redis(database_url(url, LOG_DATABASE))
    try:
        await client.flushdb()
        yield LogUnderTest(RedisDeltaLog(client, num_shards=num_shards, clock=clock), clock)
    finally:
        await client.aclose()


class Follower:
    """A gateway's subscription. `batches()` are those pushed so far: a generation of its own marks the point."""

    def __init__(self, log: MemoryDeltaLog | RedisDeltaLog, gateway_id: str) -> None:
        self.gateway_id = GatewayId(gateway_id)
        self._log = log
        self._feed = log.subscribe(self.gateway_id)

    async def start(self) -> "Follower":
        assert await asyncio.wait_for(anext(self._feed), 5) is None
        return self

    async def batches(self) -> list[Sequence[Push]]:
        mark = new_generation_id()
        await self._log.attach_many(self.gateway_id, [(mark, 0)])
        await self._log.open_many([OpenItem(generation_id=mark, attempt=1)])
        batches: list[Sequence[Push]] = []
        while True:
            batch = await asyncio.wait_for(anext(self._feed), 5)
            assert batch is not None
            if batch[0].generation_id == mark:
                return batches
            batches.append(batch)

    async def stop(self) -> None:
        await self._feed.aclose()


def delta_after(after: Cursor, *token_ids: int) -> Delta:
    return make_delta(after=after, token_ids=token_ids, texts=[f"<{token_id}>" for token_id in token_ids])
