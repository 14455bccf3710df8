"""All client streams of one gateway: one subscription to the log's pushes, and the checks that make up for lost ones."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from gateway.config import StreamLimits
from gateway.streaming.subscription import Subscription
from service_kit.delta import Cursor
from service_kit.errors import SluiceError, UnavailableError
from service_kit.ids import GatewayId, GenerationId
from service_kit.logging import get_logger
from state_store.delta_log.port import DeltaLogReader, LogView, Push
from state_store.model import GenerationRecord
from state_store.ports import GenerationStore

ItemT = TypeVar("ItemT")

_MAX_LOG_NUMBER = (1 << 53) - 1
"""Largest number the log's server keeps exact; no output is as long."""

_log = get_logger()


class StreamHub:
    """Mutable owner of this gateway's subscriptions, by generation.

    A push is routed to the readers of its generation. A reader that waits in silence is checked in bulk: the log's end,
    then the row. After a lost connection all attach again. Watch leases are renewed in bulk while anybody reads, and ended
    when the last reader of a generation leaves, so that its grace period starts at once.
    """

    def __init__(
        self,
        *,
        gateway_id: GatewayId,
        log: DeltaLogReader,
        store: GenerationStore,
        limits: StreamLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gateway_id = gateway_id
        self._delta_log = log
        self._store = store
        self._limits = limits
        self._clock = clock
        self._subscriptions: dict[GenerationId, set[Subscription]] = {}
        self._to_unwatch: set[GenerationId] = set()
        # Counts how often the push subscription was made: an attach only counts in the one it was begun in.
        self._num_feeds = 0
        self._connected = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._next_watch_at = clock() + limits.watch_refresh.total_seconds()
        self._num_calls = 0
        self._refusal: SluiceError | None = None
        self._last_word: SluiceError | None = None

    @property
    def is_draining(self) -> bool:
        return self._refusal is not None

    async def wait_connected(self) -> None:
        await self._connected.wait()

    async def wait_idle(self) -> None:
        """Until no call is left."""
        await self._idle.wait()

    def open(self, generation_id: GenerationId, cursor: Cursor) -> Subscription:
        """Registers a reader; from now on it gets pushes. Raises what `close_all` was given."""
        if self._last_word is not None:
            raise self._last_word
        subscription = Subscription(
            generation_id, cursor, max_items=self._limits.max_buffered_pushes, clock=self._clock
        )
        self._subscriptions.setdefault(generation_id, set()).add(subscription)
        return subscription

    def close(self, subscription: Subscription) -> None:
        """Forgets a reader. When it was the last one of its generation the maintenance task ends the watching: that must
        not depend on a call that is being cancelled."""
        readers = self._subscriptions.get(subscription.generation_id, set())
        readers.discard(subscription)
        if not readers:
            self._subscriptions.pop(subscription.generation_id, None)
            self._to_unwatch.add(subscription.generation_id)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Around a call from its beginning to its end: a drain waits for it. Raises what `refuse_new` was given."""
        if self._refusal is not None:
            raise self._refusal
        self._num_calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_calls -= 1
            if self._num_calls == 0:
                self._idle.set()

    def refuse_new(self, error: SluiceError) -> None:
        """New calls are refused with `error`; those that run go on."""
        self._refusal = error

    def close_all(self, error: SluiceError) -> None:
        """Ends every stream with `error` after what it has already got, those too that open later."""
        self._last_word = error
        for readers in self._subscriptions.values():
            for subscription in readers:
                subscription.fail(error)

    async def attach(self, subscription: Subscription) -> LogView | None:
        """Watches the generation and returns the log behind the cursor. None when the log cannot be reached: then the
        hub goes on trying, and the view arrives as news."""
        feed = self._num_feeds
        try:
            views = await self._delta_log.attach_many(self._gateway_id, [_question([subscription])])
        except UnavailableError:
            return None
        subscription.is_attached = feed == self._num_feeds
        return views[0]

    async def run(self) -> None:
        """Serves until cancelled; one failed round is logged and the next one tries again."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._run_subscription())
            # Apart from each other: a store that stands still must not let the leases of the watched run out.
            group.create_task(self._run_regularly(self._keep_watching))
            group.create_task(self._run_regularly(self._check_silent))

    async def _run_subscription(self) -> None:
        while True:
            try:
                async for batch in self._delta_log.subscribe(self._gateway_id):
                    self.take_pushes(batch)
            except Exception:  # noqa: BLE001 - a round that fails must not end the streams
                _log.exception("push_subscription_failed")
            self._connected.clear()
            await asyncio.sleep(self._limits.tick.total_seconds())

    async def _run_regularly(self, step: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(self._limits.tick.total_seconds())
            try:
                await step()
            except UnavailableError as error:
                _log.warning("stream_maintenance_delayed", error=str(error))
            except Exception:  # noqa: BLE001 - a round that fails must not end the streams
                _log.exception("stream_maintenance_failed")

    def take_pushes(self, batch: Sequence[Push] | None) -> None:
        """Routes pushes; None says that the subscription (again) stands and that pushes may have been missed."""
        if batch is None:
            self._num_feeds += 1
            self._connected.set()
            for subscription in self._all():
                subscription.is_attached = False
            return
        for push in batch:
            for subscription in self._subscriptions.get(push.generation_id, ()):
                subscription.put(push)

    async def end_watching(self) -> None:
        """Last act of a gateway whose streams are over: grace periods begin now, not when the leases end."""
        with contextlib.suppress(UnavailableError):
            await self._unwatch()

    async def maintain_once(self) -> None:
        """One round: end watching, attach what is not attached, check the silent, renew the leases.

        The row check comes last and runs whatever happened to the log: with the log's server away, rows still end streams.
        """
        try:
            await self._keep_watching()
        finally:
            await self._check_silent()

    async def _keep_watching(self) -> None:
        await self._unwatch()
        await self._attach_detached()
        await self._renew_watches()

    async def _unwatch(self) -> None:
        leaving, self._to_unwatch = self._to_unwatch, set()
        gone = [generation_id for generation_id in leaving if generation_id not in self._subscriptions]
        for ids in _batches(gone, self._limits.bulk):
            try:
                await self._delta_log.unwatch_many(self._gateway_id, ids)
            except UnavailableError:
                # Not kept for later: the lease (15 s) ends the watching by itself.
                return
            for generation_id in ids:
                # A reader may have attached meanwhile; the unwatch may have come after its attach.
                for subscription in self._subscriptions.get(generation_id, ()):
                    subscription.is_attached = False

    async def _attach_detached(self) -> None:
        detached = {
            generation_id: set(readers)
            for generation_id, readers in self._subscriptions.items()
            if not all(reader.is_attached for reader in readers)
        }
        for ids in _batches(list(detached), self._limits.bulk):
            feed = self._num_feeds
            questions = [_question(detached[generation_id]) for generation_id in ids]
            for view in await self._delta_log.attach_many(self._gateway_id, questions):
                for subscription in detached[view.generation_id] & self._subscriptions.get(view.generation_id, set()):
                    subscription.is_attached = feed == self._num_feeds
                    subscription.put(view)

    async def _renew_watches(self) -> None:
        if self._clock() < self._next_watch_at:
            return
        self._next_watch_at = self._clock() + self._limits.watch_refresh.total_seconds()
        for ids in _batches(list(self._subscriptions), self._limits.bulk):
            await self._delta_log.watch_many(self._gateway_id, ids)

    async def _check_silent(self) -> None:
        """Readers that have waited in silence get the log's view when it has news for them, else the row."""
        now = self._clock()
        silent: dict[GenerationId, list[Subscription]] = {}
        for subscription in self._all():
            if subscription.is_waiting and now - subscription.heard_at >= self._limits.silence.total_seconds():
                subscription.heard_at = now
                silent.setdefault(subscription.generation_id, []).append(subscription)
        for ids in _batches(list(silent), self._limits.bulk):
            answered = await self._check_log([(generation_id, silent[generation_id]) for generation_id in ids])
            rest = [generation_id for generation_id in ids if generation_id not in answered]
            for generation_id, record in zip(rest, await self._store.get_many(rest), strict=True):
                if record is not None and record.state.is_terminal:
                    _put(silent[generation_id], record)

    async def _check_log(self, silent: Sequence[tuple[GenerationId, Sequence[Subscription]]]) -> set[GenerationId]:
        """The generations for which the log had news."""
        try:
            views = await self._delta_log.read_many([_question(readers) for _, readers in silent])
        except UnavailableError:
            return set()
        answered: set[GenerationId] = set()
        for (generation_id, readers), view in zip(silent, views, strict=True):
            if view.deltas or view.terminal is not None:
                answered.add(generation_id)
                _put(readers, view)
        return answered

    def _all(self) -> list[Subscription]:
        return [subscription for readers in self._subscriptions.values() for subscription in readers]


def _put(readers: Iterable[Subscription], item: LogView | GenerationRecord) -> None:
    for subscription in readers:
        subscription.put(item)


def _question(readers: Iterable[Subscription]) -> tuple[GenerationId, int]:
    """One generation and the lowest number that one of its readers has."""
    subscriptions = list(readers)
    number = min(subscription.cursor.sequence_number for subscription in subscriptions)
    return subscriptions[0].generation_id, min(number, _MAX_LOG_NUMBER)


def _batches(items: Sequence[ItemT], size: int) -> list[list[ItemT]]:
    iterator = iter(items)
    batches: list[list[ItemT]] = []
    while batch := list(islice(iterator, size)):
        batches.append(batch)
    return batches
