"""Takes new generations in: commit, then tell, then queue."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import assert_never

from scheduler.batcher import Batcher
from scheduler.policy import queue_entry_of
from scheduler.queue.port import AdmissionQueue, BoundCheck, BoundStatus
from service_kit.crash_point import CrashPoints
from service_kit.errors import AlreadyExistsError, QuotaExceededError, Reason, UnavailableError
from service_kit.logging import get_logger
from service_kit.sampling import MAX_SEED
from state_store.model import GenerationRecord, NewGeneration, State
from state_store.ports import GenerationStore, SubmitKind, SubmitResult
from state_store.quota.port import QuotaCharge, QuotaPort

_log = get_logger()


class Admission:
    """One per scheduler process. Commits come in batches: while one commit runs, the next batch gathers."""

    def __init__(
        self,
        *,
        store: GenerationStore,
        queue: AdmissionQueue,
        quota: QuotaPort,
        crash_points: CrashPoints,
        on_queued: Callable[[], None],
    ) -> None:
        """`on_queued` wakes the dispatcher."""
        self._queue = queue
        self._store = store
        self._quota = quota
        self._crash_points = crash_points
        self._on_queued = on_queued
        self._commits: Batcher[NewGeneration, SubmitResult] = Batcher(self._commit)
        self.is_draining = False

    async def submit(self, generation: NewGeneration, *, has_seed: bool) -> SubmitResult:
        """Commits the generation, or finds the one that has its request_id. Raises AlreadyExistsError when that one has
        other arguments, UnavailableError when nothing can be committed or everybody's queue is full, QuotaExceededError
        when the tenant's part of it is."""
        if self.is_draining:
            raise UnavailableError("the scheduler is shutting down", reason=Reason.DRAINING)
        await self._check_bounds(generation)
        if not has_seed:
            seeded = replace(generation.sampling, seed=secrets.randbelow(MAX_SEED))
            generation = replace(generation, sampling=seeded)
        result = await self._commits.submit(generation)
        if result.kind is SubmitKind.CONFLICT:
            raise AlreadyExistsError(
                "this request_id stands for a request with other arguments",
                metadata={"generation_id": result.record.generation_id, "request_id": generation.request_id},
            )
        return result

    async def _check_bounds(self, generation: NewGeneration) -> None:
        """A queue that cannot be reached bounds nothing: the row waits for the reaper."""
        check = BoundCheck(
            model_key=generation.model_key,
            tenant_id=generation.tenant_id,
            priority_class=generation.priority_class,
            prompt_tokens=len(generation.prompt_token_ids),
        )
        try:
            (verdict,) = await self._queue.check_many([check])
        except UnavailableError:
            return
        match verdict.status:
            case BoundStatus.FREE:
                return
            case BoundStatus.TENANT_FULL:
                raise QuotaExceededError(
                    "too many requests of the tenant wait for this model",
                    subject=f"tenant:{generation.tenant_id}:queue",
                    reason=Reason.TENANT_QUEUE_FULL,
                    retry_after=verdict.retry_after,
                )
            case BoundStatus.QUEUE_FULL:
                raise UnavailableError(
                    "the queue of this model and class is full",
                    reason=Reason.QUEUE_FULL,
                    retry_after=verdict.retry_after,
                )
            case _:
                assert_never(verdict.status)

    async def _commit(self, generations: Sequence[NewGeneration]) -> list[SubmitResult]:
        self._crash_points.hit("submit.received")
        results = await self._store.submit_many(generations)
        self._crash_points.hit("submit.committed")
        created = [r.record for r in results if r.kind is SubmitKind.CREATED]
        await self._settle_reservations(generations, results)
        await self._enqueue(created)
        return results

    async def _settle_reservations(self, generations: Sequence[NewGeneration], results: Sequence[SubmitResult]) -> None:
        """Binds what was created; what attached or conflicted gives its reservation back. Failing is harmless: unbound
        reservations run out by themselves, and rows bind theirs again when they are settled."""
        bound: list[QuotaCharge] = []
        released: list[QuotaCharge] = []
        for generation, result in zip(generations, results, strict=True):
            (bound if result.kind is SubmitKind.CREATED else released).append(_charge_of(generation))
        try:
            await self._quota.bind_many(bound)
            await self._quota.release_many(released)
        except UnavailableError:
            _log.warning("reservations_not_settled", count=len(results))

    async def _enqueue(self, records: Sequence[GenerationRecord]) -> None:
        """Queues committed rows. The rows are accepted whatever happens here: the reaper queues what has no entry."""
        entries = [queue_entry_of(record) for record in records if record.state is State.QUEUED]
        if not entries:
            return
        try:
            await self._queue.enqueue_many(entries)
        except UnavailableError:
            _log.warning("enqueue_left_to_reaper", count=len(entries))
            return
        self._on_queued()


def _charge_of(generation: NewGeneration) -> QuotaCharge:
    return QuotaCharge(
        generation_id=generation.generation_id,
        tenant_id=generation.tenant_id,
        key_id=generation.key_id,
        prompt_tokens=len(generation.prompt_token_ids),
        max_output_tokens=generation.sampling.max_output_tokens,
    )
