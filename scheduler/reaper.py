"""Repairs what a crash left half-done, and ends what has waited too long. Every step may run on several schedulers."""

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import datetime, timedelta

from scheduler.cancellation import Cancellation
from scheduler.policy import finish_without_worker, is_unwatched_for_too_long, queue_entry_of
from scheduler.queue.port import AdmissionQueue, QueueEntry
from scheduler.quota_upkeep import QuotaReaper
from scheduler.recovery import Recovery
from scheduler.session_registry import SessionRegistry
from scheduler.tenant_weights import TenantWeights
from service_kit.delta import Cursor
from service_kit.errors import UnavailableError
from service_kit.ids import GenerationId, SessionId, minted_at
from service_kit.logging import get_logger
from state_store.delta_log.port import DeltaLogWriter
from state_store.errors import StoreUnavailableError
from state_store.model import AttemptOutcome, CancelCause, GenerationSummary, ModelKey
from state_store.ports import AttemptRef, Store

_log = get_logger()

PAGE = 500
UNQUEUED_AGE = timedelta(seconds=2)
"""A QUEUED row without an entry is younger than this while its scheduler is still about to queue it."""

WATCHERS_RETURN = timedelta(seconds=6)
"""How soon watchers are known again after the log was away or emptied: gateways attach when they are connected again, and
renew every 5 s."""

FIRST_WATCH = timedelta(seconds=5)
"""How soon a generation is first watched: its id is drawn before the call is submitted, which on a busy machine takes more
than a moment. Grace does not run before."""

CLOCK_SKEW = timedelta(milliseconds=500)
"""By how much this machine's clock may be ahead of that of the log's server without ending what is being read."""
MAX_STANDSTILL = 0.25
"""Of a lease. With a second between two rounds, and another between two renewals, no longer one can stay unnoticed and let
a lease look over: 1 + 5/4 s are less than the 4 s that are left of it when the store stops."""


class Reaper:
    """`run_once` every second. `clock` is monotonic seconds, `now` the wall clock that watch times are compared with."""

    def __init__(
        self,
        *,
        store: Store,
        log: DeltaLogWriter,
        queue: AdmissionQueue,
        weights: TenantWeights,
        registry: SessionRegistry,
        recovery: Recovery,
        cancellation: Cancellation,
        quota: QuotaReaper | None,
        lease: timedelta,
        clock: Callable[[], float],
        now: Callable[[], datetime],
    ) -> None:
        self._store = store
        self._log = log
        self._queue = queue
        self._weights = weights
        self._registry = registry
        self._recovery = recovery
        self._cancellation = cancellation
        self._quota = quota
        self._lease = lease
        self._clock = clock
        self._now = now
        self._watching_known_since: datetime | None = now()
        self._readable_since_s: float | None = None

    async def run_once(self) -> None:
        """One round. A step that fails does not keep the others from running."""
        began_s = self._clock()
        try:
            await self._store.list_sessions()
        except UnavailableError as error:
            self._readable_since_s = None
            self._watching_known_since = None  # not looked at meanwhile: the log may have been away as well
            _log.warning("reaper_cannot_read", reason=error.reason)
            return
        self._note_duration(began_s, "list_sessions")
        if self._readable_since_s is None:
            self._readable_since_s = self._clock()
        steps: list[Callable[[], Awaitable[None]]] = [
            self.rebuild_queue,
            self.lose_expired_sessions,
            self.adopt_orphans,
            self.return_in_flight,
            self.queue_unqueued,
            self.expire_overdue,
            self.end_cancelled_queued,
            self.cancel_unwatched,
            self.prune,
        ]
        for step in steps:
            began_s = self._clock()
            try:
                await step()
                self._note_duration(began_s, step.__name__)
            except StoreUnavailableError as error:
                self._readable_since_s = None
                _log.warning("reaper_step_unavailable", step=step.__name__, reason=error.reason)
            except UnavailableError as error:
                _log.warning("reaper_step_unavailable", step=step.__name__, reason=error.reason)
            except Exception:  # noqa: BLE001 - one bad row must not keep the other repairs from running
                _log.exception("reaper_step_failed", step=step.__name__)

    def _note_duration(self, began_s: float, step: str) -> None:
        """A store that stood still for a while could not be told that leases go on: it counts as one that was away."""
        took_s = self._clock() - began_s
        if took_s > self._lease.total_seconds() * MAX_STANDSTILL:
            self._readable_since_s = None
            _log.warning("store_stood_still", step=step, took_s=round(took_s, 3))

    async def rebuild_queue(self) -> None:
        """Fills an emptied queue from Postgres, then lets it serve."""
        if await self._queue.is_ready():
            return
        count = 0
        async for page in self._queued_pages(min_age=timedelta(0)):
            await self._queue.enqueue_many(await self._entries(page), is_rebuild=True)
            count += len(page)
        await self._queue.mark_ready()
        _log.info("queue_rebuilt", entries=count)

    async def lose_expired_sessions(self) -> None:
        """Only after this process has itself read the store for a whole lease: after an outage every lease looks over."""
        readable_since_s = self._readable_since_s
        if readable_since_s is None or self._clock() - readable_since_s < self._lease.total_seconds():
            return  # an earlier step of this round may have found a store gone
        for lost in await self._store.lose_expired(limit=PAGE):
            await self._registry.forget_over([lost.session_id])
            await self._recovery.recover_session(lost)

    async def adopt_orphans(self) -> None:
        """Rows whose session is over and that a recovery left RUNNING: sealed and ended, or given back."""
        orphans = await self._store.orphans(limit=PAGE)
        to_end = [record for record in orphans if finish_without_worker(record, Cursor(), None) is not None]
        await self._recovery.end_rows(to_end)
        by_session: defaultdict[SessionId | None, list[AttemptRef]] = defaultdict(list)
        for record in orphans:
            if record not in to_end:
                ref = AttemptRef(generation_id=record.generation_id, attempt=record.attempt)
                by_session[record.session_id].append(ref)
        for refs in by_session.values():
            await self._recovery.give_back(refs, AttemptOutcome.SESSION_LOST)

    async def return_in_flight(self) -> None:
        """Entries popped by a dispatcher that died before its grant."""
        returned = await self._queue.reap_in_flight(await self._queue.model_keys())
        if returned:
            _log.warning("in_flight_returned", count=returned)

    async def queue_unqueued(self) -> None:
        """Rows committed by a scheduler that died before it queued them, perhaps before it bound their reservations, and
        those that an operator has committed. Bound first: what has an entry is not looked at again."""
        async for page in self._queued_pages(min_age=UNQUEUED_AGE):
            known = await self._queue.contains_many([_entry_key(record) for record in page])
            missing = [record for record, is_known in zip(page, known, strict=True) if not is_known]
            if missing:
                _log.warning("unqueued_rows_queued", count=len(missing))
                if self._quota is not None:
                    await self._quota.bind_rows([record.generation_id for record in missing])
                await self._queue.enqueue_many(await self._entries(missing))

    async def _entries(self, rows: Sequence[GenerationSummary]) -> list[QueueEntry]:
        weights = await self._weights.of({row.tenant_id for row in rows})
        return [queue_entry_of(row, weight=weights[row.tenant_id]) for row in rows]

    async def _queued_pages(self, *, min_age: timedelta) -> AsyncIterator[list[GenerationSummary]]:
        after: GenerationId | None = None
        while page := await self._store.queued_page(after=after, min_age=min_age, limit=PAGE):
            yield page
            after = page[-1].generation_id

    async def expire_overdue(self) -> None:
        """Deadlines and queue timeouts."""
        after: GenerationId | None = None
        while page := await self._store.overdue_page(after=after, limit=PAGE):
            await self._cancellation.request(page)
            after = page[-1][0]

    async def end_cancelled_queued(self) -> None:
        """QUEUED rows whose end was asked for, or that have no attempt left, and whose scheduler died before ending them."""
        after: GenerationId | None = None
        while page := await self._store.cancelled_queued_page(after=after, limit=PAGE):
            await self._recovery.end_rows(page)
            after = page[-1].generation_id

    async def cancel_unwatched(self) -> None:
        """Grace: nobody has read it for longer than its caller allows. While the log is away, and just after it was
        emptied, nobody can be seen reading."""
        try:
            await self._log.kept_since()
            if self._watching_known_since is None:
                self._watching_known_since = self._now() + WATCHERS_RETURN
            await self._cancel_unwatched(self._watching_known_since)
        except UnavailableError:
            self._watching_known_since = None
            raise

    async def _cancel_unwatched(self, watching_known_since: datetime) -> None:
        after: GenerationId | None = None
        while page := await self._store.unwatchable_page(after=after, limit=PAGE):
            # Before the answer: what is watched just then is never older than this, however short its grace.
            now = self._now() - CLOCK_SKEW
            watched = await self._log.last_watched_many([generation_id for generation_id, _ in page])
            kept_since = await self._log.kept_since()
            over = [
                (generation_id, CancelCause.GRACE)
                for (generation_id, grace), last in zip(page, watched, strict=True)
                if is_unwatched_for_too_long(
                    last_watched_at=last,
                    created_at=minted_at(generation_id) + (FIRST_WATCH if last is None else timedelta(0)),
                    watching_known_since=max(watching_known_since, kept_since + WATCHERS_RETURN),
                    grace=grace,
                    now=now,
                )
            ]
            if over:
                await self._cancellation.request(over)
            after = page[-1][0]

    async def prune(self) -> None:
        """Request keys whose 24 h are over."""
        await self._store.prune_request_keys(limit=PAGE)


def _entry_key(record: GenerationSummary) -> tuple[ModelKey, GenerationId, int]:
    return record.model_key, record.generation_id, record.attempt
