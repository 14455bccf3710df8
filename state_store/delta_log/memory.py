"""Memory twin of the delta log: the same rules as the scripts in lua/, for tests and simulations in one process."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from service_kit.delta import Cursor, Delta
from service_kit.ids import GatewayId, GenerationId
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
from state_store.delta_log.settings import LogSettings
from state_store.errors import LogUnavailableError

MAX_BATCHES_PER_SUBSCRIBER = 1024
"""A slower subscriber loses what is queued and is told to attach again, as a slow Redis client is cut off."""


@dataclass(slots=True)
class _Log:
    attempt: int
    is_open: bool
    base: Cursor
    end: Cursor
    expires_at: datetime
    deltas: list[Delta] = field(default_factory=list)
    terminal: LogEnd | None = None

    def chain_at(self, sequence_number: int) -> int | None:
        """Chain at a position where a delta ends, or None where none does."""
        for known in (self.end, self.base, *(delta.end for delta in self.deltas)):
            if known.sequence_number == sequence_number:
                return known.chain
        return None

    def contradicts(self, cursor: Cursor) -> bool:
        return self.chain_at(cursor.sequence_number) not in (None, cursor.chain)


class _Batch:
    """Pushes of one call, gathered by gateway."""

    def __init__(self) -> None:
        self.pushes_by_gateway: defaultdict[GatewayId, list[Push]] = defaultdict(list)


class MemoryDeltaLog:
    """Writer and reader over one process's memory. `clock` gives the aware time.

    Faults for tests: `is_reachable = False` makes every call raise, `lose_all()` empties it, `interrupt()` does to the
    subscribers what a lost connection does.
    """

    def __init__(self, clock: Callable[[], datetime], settings: LogSettings | None = None) -> None:
        self._clock = clock
        self._settings = settings or LogSettings()
        self._logs: dict[GenerationId, _Log] = {}
        self._lease_ends: dict[GenerationId, dict[GatewayId, datetime]] = {}
        self._queues: defaultdict[GatewayId, set[asyncio.Queue[Sequence[Push] | None]]] = defaultdict(set)
        self._kept_since: datetime | None = None
        self.is_reachable = True

    def lose_all(self) -> None:
        self._logs.clear()
        self._lease_ends.clear()
        self._kept_since = None

    def interrupt(self) -> None:
        for queues in self._queues.values():
            for queue in queues:
                _restart(queue)

    async def open_many(self, items: Sequence[OpenItem]) -> list[OpenResult]:
        self._check_reachable()
        self._forget_expired()
        batch = _Batch()
        results = [self._open(item, batch) for item in items]
        self._publish(batch)
        return results

    async def append_many(self, items: Sequence[AppendItem]) -> list[AppendResult]:
        self._check_reachable()
        batch = _Batch()
        results = [self._append(item, batch) for item in items]
        self._publish(batch)
        return results

    async def seal_many(self, items: Sequence[SealItem]) -> list[LogView]:
        self._check_reachable()
        batch = _Batch()
        views = [self._seal(item, batch) for item in items]
        self._publish(batch)
        return views

    async def drop_many(self, generation_ids: Sequence[GenerationId]) -> None:
        self._check_reachable()
        for generation_id in generation_ids:
            self._logs.pop(generation_id, None)
            self._lease_ends.pop(generation_id, None)

    async def unsealed_page(self, place: int, *, limit: int) -> tuple[list[GenerationId], int]:
        self._check_reachable()
        self._forget_expired()
        names = sorted(self._logs.keys() | self._lease_ends.keys())
        page = names[place : place + limit]
        unsealed = [each for each in page if (log := self._find(each)) is None or log.terminal is None]
        return unsealed, place + limit if place + limit < len(names) else 0

    async def read_many(self, items: Sequence[tuple[GenerationId, int]]) -> list[LogView]:
        self._check_reachable()
        return [self._view(generation_id, after) for generation_id, after in items]

    async def last_watched_many(self, generation_ids: Sequence[GenerationId]) -> list[datetime | None]:
        self._check_reachable()
        return [self._last_watched(generation_id) for generation_id in generation_ids]

    async def kept_since(self) -> datetime:
        self._check_reachable()
        if self._kept_since is None:
            self._kept_since = self._clock()
        return self._kept_since

    async def attach_many(self, gateway_id: GatewayId, items: Sequence[tuple[GenerationId, int]]) -> list[LogView]:
        self._check_reachable()
        for generation_id, _ in items:
            self._watch(gateway_id, generation_id)
        return [self._view(generation_id, after) for generation_id, after in items]

    async def watch_many(self, gateway_id: GatewayId, generation_ids: Sequence[GenerationId]) -> None:
        self._check_reachable()
        for generation_id in generation_ids:
            self._watch(gateway_id, generation_id)

    async def unwatch_many(self, gateway_id: GatewayId, generation_ids: Sequence[GenerationId]) -> None:
        self._check_reachable()
        now = self._clock()
        for generation_id in generation_ids:
            lease_ends = self._lease_ends.get(generation_id, {})
            if lease_ends.get(gateway_id, now) > now:
                lease_ends[gateway_id] = now

    async def subscribe(self, gateway_id: GatewayId) -> AsyncGenerator[Sequence[Push] | None, None]:
        queue: asyncio.Queue[Sequence[Push] | None] = asyncio.Queue(MAX_BATCHES_PER_SUBSCRIBER)
        self._queues[gateway_id].add(queue)
        try:
            yield None
            while True:
                yield await queue.get()
        finally:
            self._queues[gateway_id].discard(queue)

    def _open(self, item: OpenItem, batch: _Batch) -> OpenResult:
        log = self._find(item.generation_id)
        if log is not None and (log.terminal is not None or log.attempt >= item.attempt):
            return OpenResult(
                is_opened=False, attempt=log.attempt, base=log.base, end=log.end, deltas=tuple(log.deltas)
            )
        expires_at = self._clock() + self._settings.live_retention
        is_lost = log is None or log.end.sequence_number < item.base.sequence_number or log.contradicts(item.base)
        if log is None or is_lost:
            log = _Log(attempt=item.attempt, is_open=True, base=item.base, end=item.base, expires_at=expires_at)
            self._logs[item.generation_id] = log
        log.attempt, log.is_open, log.expires_at = item.attempt, True, expires_at
        self._push(batch, Push(generation_id=item.generation_id, attempt=item.attempt, end=log.end))
        return OpenResult(is_opened=True, attempt=log.attempt, base=log.base, end=log.end, deltas=tuple(log.deltas))

    def _append(self, item: AppendItem, batch: _Batch) -> AppendResult:
        log = self._find(item.generation_id)
        if log is None:
            return AppendResult(status=AppendStatus.ABSENT, end=Cursor())
        status = _judge(log, item)
        if status is AppendStatus.OK:
            log.deltas.append(item.delta)
            log.end = item.delta.end
            log.expires_at = self._clock() + self._settings.live_retention
            push = Push(generation_id=item.generation_id, attempt=item.attempt, end=log.end, delta=item.delta)
            self._push(batch, push)
        return AppendResult(status=status, end=log.end)

    def _seal(self, item: SealItem, batch: _Batch) -> LogView:
        log = self._find(item.generation_id)
        if log is None:
            if item.terminal is not None:
                self._push_terminal(batch, item, item.attempt, Cursor())
                self._lease_ends.pop(item.generation_id, None)
            return LogView(generation_id=item.generation_id, is_present=False)
        if log.terminal is None:
            if item.attempt >= log.attempt:
                log.attempt, log.is_open = item.attempt, False
            if item.terminal is not None:
                log.terminal, log.is_open = item.terminal, False
                log.expires_at = self._clock() + self._settings.terminal_retention
                self._push_terminal(batch, item, log.attempt, log.end)
        return self._view(item.generation_id, log.end.sequence_number)

    def _push_terminal(self, batch: _Batch, item: SealItem, attempt: int, end: Cursor) -> None:
        push = Push(generation_id=item.generation_id, attempt=attempt, end=end, terminal=item.terminal)
        self._push(batch, push)

    def _view(self, generation_id: GenerationId, after: int) -> LogView:
        log = self._find(generation_id)
        if log is None:
            return LogView(generation_id=generation_id, is_present=False)
        return LogView(
            generation_id=generation_id,
            is_present=True,
            attempt=log.attempt,
            is_open=log.is_open,
            base=log.base,
            end=log.end,
            deltas=tuple(delta for delta in log.deltas if delta.last > after),
            terminal=log.terminal,
        )

    def _watch(self, gateway_id: GatewayId, generation_id: GenerationId) -> None:
        now = self._clock()
        lease_ends = self._lease_ends.setdefault(generation_id, {})
        for ended in [known for known, lease_end in lease_ends.items() if lease_end <= now]:
            del lease_ends[ended]
        lease_ends[gateway_id] = now + self._settings.watch_lease

    def _last_watched(self, generation_id: GenerationId) -> datetime | None:
        lease_ends = self._lease_ends.get(generation_id)
        return min(max(lease_ends.values()), self._clock()) if lease_ends else None

    def _push(self, batch: _Batch, push: Push) -> None:
        now = self._clock()
        for gateway_id, lease_end in self._lease_ends.get(push.generation_id, {}).items():
            if lease_end > now:
                batch.pushes_by_gateway[gateway_id].append(push)

    def _publish(self, batch: _Batch) -> None:
        for gateway_id, pushes in batch.pushes_by_gateway.items():
            for queue in self._queues[gateway_id]:
                if queue.full():
                    _restart(queue)
                else:
                    queue.put_nowait(tuple(pushes))

    def _find(self, generation_id: GenerationId) -> _Log | None:
        log = self._logs.get(generation_id)
        return log if log is not None and log.expires_at > self._clock() else None

    def _forget_expired(self) -> None:
        now = self._clock()
        for generation_id in [known for known, log in self._logs.items() if log.expires_at <= now]:
            del self._logs[generation_id]
            self._lease_ends.pop(generation_id, None)

    def _check_reachable(self) -> None:
        if not self.is_reachable:
            raise LogUnavailableError("the delta log cannot be reached")


def _judge(log: _Log, item: AppendItem) -> AppendStatus:
    """What append answers. STALE also for a sender whose output differs from the log's: it must not go on."""
    delta = item.delta
    if log.terminal is not None or log.attempt > item.attempt:
        return AppendStatus.STALE
    if log.attempt < item.attempt:
        return AppendStatus.UNOPENED
    if not log.is_open:
        return AppendStatus.STALE
    if delta.last <= log.end.sequence_number:
        return AppendStatus.STALE if log.contradicts(delta.end) else AppendStatus.DUP
    if delta.first != log.end.sequence_number + 1:
        return AppendStatus.GAP
    return AppendStatus.OK if delta.prev_chain == log.end.chain else AppendStatus.STALE


def _restart(queue: asyncio.Queue[Sequence[Push] | None]) -> None:
    while not queue.empty():
        queue.get_nowait()
    queue.put_nowait(None)
