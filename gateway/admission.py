"""Everything between an authenticated call and a committed generation, cheapest refusals first."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from opentelemetry import trace

from gateway.model_registry import ModelRegistry
from gateway.prompt import PromptEncoder
from gateway.queue_room import QueueName, QueueRooms
from gateway.quota import CallQuota, Metadata
from gateway.request_hash import request_hash
from gateway.sampling_validation import parse_sampling
from gateway.submit import Committed, Submission, Submitter
from gateway.validation import parse_delivery, parse_priority_class, parse_request_id
from inference.v1 import types_pb2
from service_kit.delta import Cursor
from service_kit.errors import InvalidArgumentError, QuotaExceededError, UnavailableError
from service_kit.ids import GenerationId, RequestId, new_generation_id
from service_kit.telemetry import current_traceparent
from state_store.ports import GenerationStore
from state_store.quota.port import QuotaPort
from state_store.tenants import ApiKey


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """The ids of one call. `generation_id` is in force only when no generation has the request id yet."""

    generation_id: GenerationId
    request_id: RequestId
    is_named: bool = True
    """Whether the client named the request id: only such a call may attach."""


class Admission:
    """Validates, encodes and submits."""

    def __init__(
        self,
        *,
        registry: ModelRegistry,
        encoder: PromptEncoder,
        submitter: Submitter,
        queue_rooms: QueueRooms,
        quota: QuotaPort,
        store: GenerationStore,
    ) -> None:
        self._registry = registry
        self._encoder = encoder
        self._submitter = submitter
        self._queue_rooms = queue_rooms
        self._quota = quota
        self._store = store

    def mint(self, request_id: str, *, cursor: Cursor) -> NewRequest:
        """Ids for a call. Raises InvalidArgumentError."""
        parsed = parse_request_id(request_id)
        if parsed is None and cursor.sequence_number > 0:
            raise InvalidArgumentError("request_id", "must be set when a cursor is given")
        generation_id = new_generation_id()
        return NewRequest(
            generation_id=generation_id,
            request_id=parsed or RequestId(generation_id),
            is_named=parsed is not None,
        )

    async def look(self, new: NewRequest, key: ApiKey, tell: Callable[[Metadata], None]) -> CallQuota:
        """The call's quota, once it has a place for the call, or the call attaches. Raises as `CallQuota.look` does."""
        quota = CallQuota(
            quota=self._quota,
            store=self._store,
            key=key,
            request_id=new.request_id if new.is_named else None,
            tell=tell,
        )
        await quota.look()
        return quota

    async def admit(
        self,
        new: NewRequest,
        spec: types_pb2.GenerationSpec,
        delivery: types_pb2.Delivery,
        *,
        key: ApiKey,
        quota: CallQuota,
        default_grace: timedelta | None,
        span: trace.Span,
    ) -> Committed:
        """Commits the request or finds its generation; `span` is the parent of all that follows, in every process.

        Raises InvalidArgumentError with the path of the field, NotFoundError for a model unknown or not allowed, and what
        `Submitter.submit` raises.
        """
        if not spec.model:
            raise InvalidArgumentError("spec.model", "must be set")
        model = self._registry.get(spec.model, key.tenant)
        draft = parse_sampling(spec.sampling, vocab_size=model.manifest.vocab_size)
        priority_class = parse_priority_class(spec.priority_class, key.tenant)
        times = parse_delivery(delivery, default_grace=default_grace)
        queue = QueueName(
            revision=model.manifest.revision, priority_class=priority_class, tenant_id=key.tenant.tenant_id
        )
        full = self._queue_rooms.refusal(queue)
        # A known request id attaches, full queue or not; only such a caller costs a look into the store.
        if full is not None and not await quota.is_known():
            raise full
        with trace.use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
            prompt_token_ids = await self._encoder.encode_spec(spec, model)
            sampling = draft.complete(
                num_prompt_tokens=len(prompt_token_ids), context_length=model.manifest.context_length
            )
            submission = Submission(
                generation_id=new.generation_id,
                request_id=new.request_id,
                is_named=new.is_named,
                request_hash=request_hash(spec),
                key=key,
                manifest=model.manifest,
                prompt_token_ids=prompt_token_ids,
                sampling=sampling,
                has_seed=draft.seed is not None,
                priority_class=priority_class,
                times=times,
                traceparent=current_traceparent(),
            )
            return await self._submit(submission, quota, queue)

    async def _submit(self, submission: Submission, quota: CallQuota, queue: QueueName) -> Committed:
        with self._queue_rooms.asking(queue):
            try:
                committed = await self._submitter.submit(submission, quota)
            except (QuotaExceededError, UnavailableError) as error:
                self._queue_rooms.note_refusal(queue, error)
                raise
        if committed.places is not None:
            self._queue_rooms.note_places(queue, committed.places)
        return committed
