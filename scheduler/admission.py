"""Takes new generations in: refuse what has no place, commit, then tell, then queue."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import assert_never

from scheduler.batcher import Batcher
from scheduler.model_directory import ModelDirectory, SessionSizes
from scheduler.policy import queue_entry_of
from scheduler.queue.port import AdmissionQueue, BoundCheck, BoundStatus, BoundVerdict
from scheduler.tenant_weights import TenantWeights
from service_kit.crash_point import CrashPoints
from service_kit.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    QuotaExceededError,
    Reason,
    SluiceError,
    UnavailableError,
)
from service_kit.ids import GenerationId
from service_kit.logging import get_logger
from service_kit.sampling import MAX_SEED
from state_store.model import GenerationRecord, NewGeneration, State
from state_store.ports import GenerationStore, SubmitKind, SubmitResult
from state_store.pulse import Pulse
from state_store.quota.port import QuotaCharge, QuotaPort

_log = get_logger()

NO_WORKER_RETRY_AFTER = timedelta(seconds=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """The generation that has the request id; `room` is what its check saw, when it was committed by this call."""

    kind: SubmitKind
    record: GenerationRecord
    room: BoundVerdict | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """`is_new`: nobody can know its request id yet."""

    generation: NewGeneration
    is_new: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    """A place in a queue that is taken before the entry is there."""

    check: BoundCheck
    verdict: BoundVerdict


class Admission:
    """One per scheduler process. Checks and commits come in batches of their own: while one runs, the next batch gathers, and
    what is refused does not wait for what is committed."""

    def __init__(
        self,
        *,
        store: GenerationStore,
        queue: AdmissionQueue,
        models: ModelDirectory,
        weights: TenantWeights,
        quota: QuotaPort,
        crash_points: CrashPoints,
        on_queued: Callable[[], None],
        pulse: Pulse | None = None,
    ) -> None:
        """`on_queued` wakes the dispatcher. `pulse` is the store's: without it a caller waits as long as the store's calls
        may take."""
        self._queue = queue
        self._store = store
        self._models = models
        self._weights = weights
        self._quota = quota
        self._crash_points = crash_points
        self._on_queued = on_queued
        self._pulse = pulse
        self._checks: Batcher[_Asked, SubmitResult | SluiceError | None] = Batcher(self._check)
        self._commits: Batcher[NewGeneration, SubmitResult] = Batcher(self._commit)
        self._claims: dict[GenerationId, _Claim] = {}
        """Places of what has passed its check and is not queued yet."""
        self._taking: set[asyncio.Task[Submitted | SluiceError]] = set()
        self.is_draining = False

    @property
    def num_claims(self) -> int:
        """Requests that have passed their check and are not queued yet."""
        return len(self._claims)

    async def submit(self, generation: NewGeneration, *, has_seed: bool, is_new: bool = False) -> Submitted:
        """Commits the generation, or finds the one that has its request_id: that one attaches whatever is full. With `is_new`
        nobody can know the request_id yet, so that a refusal costs no look into the store. Raises
        AlreadyExistsError when it has other arguments, InvalidArgumentError for what no worker can hold,
        QuotaExceededError when the tenant has its share of the queue, UnavailableError when nothing can be committed, the
        queue is full or the model has no worker."""
        if self.is_draining:
            raise UnavailableError("the scheduler is shutting down", reason=Reason.DRAINING)
        if not has_seed:
            seeded = replace(generation.sampling, seed=secrets.randbelow(MAX_SEED))
            generation = replace(generation, sampling=seeded)
        result = await self._commit_in_time(_Asked(generation=generation, is_new=is_new))
        if isinstance(result, SluiceError):
            raise result
        if result.kind is SubmitKind.CONFLICT:
            raise AlreadyExistsError(
                "this request_id stands for a request with other arguments",
                metadata={"generation_id": result.record.generation_id, "request_id": generation.request_id},
            )
        return result

    async def _commit_in_time(self, asked: _Asked) -> Submitted | SluiceError:
        """Raises UnavailableError as soon as the store does not answer. What was handed in may be committed later all the
        same: the caller comes again with its request id, or nobody ever reads it and its grace ends it."""
        if self._pulse is None:
            return await self._take(asked)
        return await self._pulse.while_answering(lambda: self._take(asked))

    async def _take(self, asked: _Asked) -> Submitted | SluiceError:
        taking = asyncio.create_task(self._check_and_commit(asked))
        self._taking.add(taking)
        taking.add_done_callback(self._on_taken)
        return await asyncio.shield(taking)

    def _on_taken(self, taking: "asyncio.Task[Submitted | SluiceError]") -> None:
        self._taking.discard(taking)
        if not taking.cancelled():
            taking.exception()  # a caller that went away must not make it "never retrieved"

    async def _check_and_commit(self, asked: _Asked) -> Submitted | SluiceError:
        """Goes on when its caller has gone, so that it gives its claim back."""
        generation = asked.generation
        try:
            checked = await self._checks.submit(asked)
            if isinstance(checked, SluiceError):
                return checked
            if checked is not None:
                return Submitted(kind=checked.kind, record=checked.record)
            committed = await self._commits.submit(generation)
            # Gone when the same generation was handed in twice and the other call has ended.
            claim = self._claims.get(generation.generation_id)
            return Submitted(
                kind=committed.kind, record=committed.record, room=None if claim is None else claim.verdict
            )
        finally:
            self._claims.pop(generation.generation_id, None)

    async def _check(self, asked: Sequence[_Asked]) -> list[SubmitResult | SluiceError | None]:
        """None for what may be committed; it has a claim to its place then."""
        self._crash_points.hit("submit.received")
        results = await self._attach(asked, await self._refusals([each.generation for each in asked]))
        attached = [
            (each.generation, result)
            for each, result in zip(asked, results, strict=True)
            if isinstance(result, SubmitResult)
        ]
        await self._settle_reservations(attached)
        return results

    async def _commit(self, generations: Sequence[NewGeneration]) -> list[SubmitResult]:
        results = await self._store.submit_many(generations)
        self._crash_points.hit("submit.committed")
        await self._settle_reservations(list(zip(generations, results, strict=True)))
        await self._enqueue([result.record for result in results if result.kind is SubmitKind.CREATED])
        return results

    # -- what has no place

    async def _refusals(self, generations: Sequence[NewGeneration]) -> list[SluiceError | None]:
        """Why each is refused if it is new; None where it may be committed."""
        sizes = {key: await self._models.sizes_of(key) for key in {each.model_key for each in generations}}
        refusals: list[SluiceError | None] = [_misfit(each, sizes[each.model_key]) for each in generations]
        fitting = [index for index, refusal in enumerate(refusals) if refusal is None]
        if fitting:
            bounds = await self._over_bounds([generations[index] for index in fitting])
            for index, refusal in zip(fitting, bounds, strict=True):
                refusals[index] = refusal
        return refusals

    async def _over_bounds(self, generations: Sequence[NewGeneration]) -> list[SluiceError | None]:
        """Behind everything that has a claim to a place."""
        claims = [claim.check for claim in self._claims.values()]
        checks = [_bound_check_of(each) for each in generations]
        try:
            verdicts = (await self._queue.check_many([*claims, *checks]))[len(claims) :]
        except UnavailableError as error:
            # One error each: they are raised in as many tasks.
            return [UnavailableError(error.message, reason=Reason.STORE_UNAVAILABLE) for _ in generations]
        refusals = [_refusal_of(each, verdict) for each, verdict in zip(generations, verdicts, strict=True)]
        for each, check, verdict in zip(generations, checks, verdicts, strict=True):
            if verdict.status is BoundStatus.FREE:
                self._claims[each.generation_id] = _Claim(check=check, verdict=verdict)
        return refusals

    async def _attach(
        self, asked: Sequence[_Asked], refusals: Sequence[SluiceError | None]
    ) -> list[SubmitResult | SluiceError | None]:
        """The refusals, but for those whose request_id is known: these find their generation."""
        results: list[SubmitResult | SluiceError | None] = list(refusals)
        sought = [index for index, refusal in enumerate(refusals) if refusal is not None and not asked[index].is_new]
        if sought:
            known = await self._store.attach_many([asked[index].generation for index in sought])
            for index, result in zip(sought, known, strict=True):
                results[index] = result or refusals[index]
        return results

    # -- after the commit

    async def _settle_reservations(self, results: Sequence[tuple[NewGeneration, SubmitResult]]) -> None:
        """Binds what was created, now or by a scheduler that died behind the commit, so that the gateway came here; what
        attached to another or conflicted gives its reservation back, as gateways do of what was refused. Failing is harmless:
        unbound reservations run out by themselves, and rows bind theirs again when they are settled."""
        bound: list[QuotaCharge] = []
        released: list[QuotaCharge] = []
        for generation, result in results:
            (bound if _is_committed(generation, result) else released).append(_charge_of(generation))
        try:
            await self._quota.bind_many(bound)
            await self._quota.release_many(released)
        except UnavailableError:
            _log.warning("reservations_not_settled", count=len(results))

    async def _enqueue(self, records: Sequence[GenerationRecord]) -> None:
        """Queues committed rows. The rows are accepted whatever happens here: the reaper queues what has no entry."""
        queued = [record for record in records if record.state is State.QUEUED]
        if not queued:
            return
        weights = await self._weights.of({record.tenant_id for record in queued})
        try:
            await self._queue.enqueue_many([queue_entry_of(each, weight=weights[each.tenant_id]) for each in queued])
        except UnavailableError:
            _log.warning("enqueue_left_to_reaper", count=len(queued))
            return
        self._on_queued()


def _misfit(generation: NewGeneration, sizes: Sequence[SessionSizes]) -> SluiceError | None:
    """Why no worker could ever run it."""
    if not sizes:
        return UnavailableError(
            "no worker serves this model now", reason=Reason.NO_WORKER, retry_after=NO_WORKER_RETRY_AFTER
        )
    num_prompt, max_output = len(generation.prompt_token_ids), generation.sampling.max_output_tokens
    if any(each.can_hold(num_prompt + max_output) for each in sizes):
        return None
    largest = max(min(each.context_length, each.capacity_tokens) for each in sizes)
    return InvalidArgumentError(
        "prompt_token_ids",
        f"{num_prompt} tokens and at most {max_output} of output; the largest worker holds {largest}",
        reason=Reason.PROMPT_TOO_LONG,
        metadata={"num_prompt_tokens": str(num_prompt), "max_tokens": str(largest)},
    )


def _refusal_of(generation: NewGeneration, verdict: BoundVerdict) -> SluiceError | None:
    metadata = {} if verdict.bound is None else {"bound": verdict.bound.value}
    match verdict.status:
        case BoundStatus.FREE:
            return None
        case BoundStatus.TENANT_FULL:
            return QuotaExceededError(
                "as many requests or prompt tokens of this tenant are queued as it may have",
                subject=f"tenant:{generation.tenant_id}:queue",
                reason=Reason.TENANT_QUEUE_FULL,
                retry_after=verdict.retry_after,
                metadata=metadata,
            )
        case BoundStatus.QUEUE_FULL:
            return UnavailableError(
                "the queue of this model and class is full",
                reason=Reason.QUEUE_FULL,
                retry_after=verdict.retry_after,
                metadata=metadata,
            )
        case _:
            assert_never(verdict.status)


def _is_committed(generation: NewGeneration, result: SubmitResult) -> bool:
    """Whether it stands for itself, not for another generation with its request id."""
    return result.kind is not SubmitKind.CONFLICT and result.record.generation_id == generation.generation_id


def _bound_check_of(generation: NewGeneration) -> BoundCheck:
    return BoundCheck(
        model_key=generation.model_key,
        tenant_id=generation.tenant_id,
        priority_class=generation.priority_class,
        prompt_tokens=len(generation.prompt_token_ids),
    )


def _charge_of(generation: NewGeneration) -> QuotaCharge:
    return QuotaCharge(
        generation_id=generation.generation_id,
        tenant_id=generation.tenant_id,
        key_id=generation.key_id,
        prompt_tokens=len(generation.prompt_token_ids),
        max_output_tokens=generation.sampling.max_output_tokens,
    )
