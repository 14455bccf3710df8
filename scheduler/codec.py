"""Protobuf to model and back, for the scheduler's two internal services."""

from collections.abc import Sequence
from datetime import timedelta

from google.protobuf import duration_pb2
from google.protobuf.message import Message

from inference.internal.v1 import scheduler_pb2, worker_pb2
from scheduler.attempt_table import HeldAttempt
from scheduler.coordinator import AttemptNews, NewsResult, Verdict
from scheduler.policy import WorkerEnd
from scheduler.session_load import SessionLoad, room_by_class
from service_kit.delta import Delta
from service_kit.errors import InvalidArgumentError
from service_kit.ids import GenerationId, KeyId, RequestId, SchedulerId, SessionId, TenantId
from service_kit.sampling import FinishReason
from service_kit.sampling_codec import decode_logprobs, decode_sampling, encode_sampling
from state_store.model import GenerationRecord, ModelKey, NewGeneration, NewSession, PriorityClass
from state_store.ports import AttemptRef

_ACTIONS = {
    Verdict.KEEP: worker_pb2.VERDICT_ACTION_KEEP,
    Verdict.RESEND_FROM: worker_pb2.VERDICT_ACTION_RESEND_FROM,
    Verdict.ABORT: worker_pb2.VERDICT_ACTION_ABORT,
}
_REQUEST_HASH_BYTES = 32


def decode_submit(request: scheduler_pb2.SubmitRequest) -> NewGeneration:
    """The generation a gateway hands over. Raises InvalidArgumentError; gateways validate before, so it is their bug."""
    required = ("generation_id", "tenant_id", "key_id", "request_id", "model", "model_revision", "precision")
    for field in required:
        if not getattr(request, field):
            raise _invalid(field, "must be set")
    if len(request.request_hash) != _REQUEST_HASH_BYTES:
        raise _invalid("request_hash", f"must have {_REQUEST_HASH_BYTES} bytes")
    if not request.prompt_token_ids:
        raise _invalid("prompt_token_ids", "must not be empty")
    if request.priority >= len(PriorityClass):
        raise _invalid("priority", f"must be below {len(PriorityClass)}")
    if not request.HasField("queue_timeout"):
        raise _invalid("queue_timeout", "must be set")
    return NewGeneration(
        generation_id=GenerationId(request.generation_id),
        tenant_id=TenantId(request.tenant_id),
        key_id=KeyId(request.key_id),
        request_id=RequestId(request.request_id),
        request_hash=request.request_hash,
        model=request.model,
        model_key=ModelKey(revision=request.model_revision, precision=request.precision),
        priority_class=PriorityClass.from_rank(request.priority),
        prompt_token_ids=tuple(request.prompt_token_ids),
        sampling=decode_sampling(request.sampling, field="sampling"),
        grace=_optional_duration(request, "grace"),
        queue_timeout=_duration(request.queue_timeout),
        deadline=_optional_duration(request, "deadline"),
        traceparent=request.traceparent,
        is_stored=request.store if request.HasField("store") else True,
    )


def _invalid(field: str, description: str) -> InvalidArgumentError:
    return InvalidArgumentError(field, description)


def _duration(value: duration_pb2.Duration) -> timedelta:
    return timedelta(seconds=value.seconds, microseconds=value.nanos / 1000)


def _optional_duration(request: Message, field: str) -> timedelta | None:
    return _duration(getattr(request, field)) if request.HasField(field) else None


def decode_announcement(request: scheduler_pb2.AnnounceWorkerRequest, *, scheduler_id: SchedulerId) -> NewSession:
    """The session a worker asks for. Raises InvalidArgumentError."""
    for field in ("address", "session_id", "worker_id"):
        if not getattr(request, field):
            raise _invalid(field, "must be set")
    capabilities = request.capabilities
    for field in ("model", "model_revision", "precision", "context_length", "num_blocks", "block_size", "max_running"):
        if not getattr(capabilities, field):
            raise _invalid(f"capabilities.{field}", "must be set")
    return NewSession(
        session_id=SessionId(request.session_id),
        worker_id=request.worker_id,
        address=request.address,
        scheduler_id=scheduler_id,
        model=capabilities.model,
        model_key=ModelKey(revision=capabilities.model_revision, precision=capabilities.precision),
        context_length=capabilities.context_length,
        num_blocks=capabilities.num_blocks,
        block_size=capabilities.block_size,
        max_running=capabilities.max_running,
        kv_dtype=capabilities.kv_dtype,
    )


def decode_ref(ref: worker_pb2.AttemptRef) -> AttemptRef:
    return AttemptRef(generation_id=GenerationId(ref.generation_id), attempt=ref.attempt)


def encode_ref(ref: AttemptRef) -> worker_pb2.AttemptRef:
    return worker_pb2.AttemptRef(generation_id=ref.generation_id, attempt=ref.attempt)


def decode_held(held: Sequence[worker_pb2.HeldAttempt]) -> list[HeldAttempt]:
    return [
        HeldAttempt(ref=decode_ref(item.attempt), position=item.position, is_finished=item.is_finished) for item in held
    ]


def decode_load(load: worker_pb2.LoadReport) -> SessionLoad:
    """Raises ValueError for a report that makes no sense: the worker's bug, which ends its session."""
    return SessionLoad(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_blocks=load.num_blocks,
        num_cached_blocks=load.num_cached_blocks,
        room_blocks=room_by_class(load.room_blocks, num_free_blocks=load.num_free_blocks),
        is_draining=load.is_draining,
    )


def decode_untried(lost: worker_pb2.EngineLost) -> frozenset[AttemptRef] | None:
    """None where the worker does not know."""
    return frozenset(map(decode_ref, lost.untried)) if lost.is_step_known else None


def decode_batch(batch: worker_pb2.DeltaBatch) -> list[AttemptNews]:
    """News per attempt. Raises ValueError for a malformed delta: the worker's bug, which ends its session."""
    return [
        AttemptNews(
            ref=decode_ref(item.attempt),
            delta=_decode_delta(item) if item.token_ids else None,
            end=_decode_end(item.end) if item.HasField("end") else None,
        )
        for item in batch.deltas
    ]


def _decode_delta(item: worker_pb2.AttemptDelta) -> Delta:
    return Delta(
        first=item.first,
        token_ids=tuple(item.token_ids),
        texts=tuple(item.texts),
        prev_chain=item.prev_chain,
        chain=item.chain,
        logprobs=decode_logprobs(item.logprobs),
    )


def _decode_end(end: worker_pb2.AttemptEnd) -> WorkerEnd:
    return WorkerEnd(
        output_tokens=end.output_tokens,
        cached_prompt_tokens=end.cached_prompt_tokens,
        finish_reason=FinishReason(end.finish_reason) if end.finish_reason else None,
        failure=end.failure or None,
        matched_stop=end.matched_stop if end.HasField("matched_stop") else None,
    )


def encode_assignment(
    record: GenerationRecord, *, output_token_ids: Sequence[int], priority: int, traceparent: str, prefix_salt: str
) -> worker_pb2.Assignment:
    """A granted attempt as its worker gets it. `priority` is the rank that the engine orders it by."""
    return worker_pb2.Assignment(
        generation_id=record.generation_id,
        attempt=record.attempt,
        prompt_token_ids=record.prompt_token_ids,
        output_token_ids=output_token_ids,
        sampling=encode_sampling(record.sampling),
        priority=priority,
        nonce=record.nonce,
        traceparent=traceparent,
        prefix_salt=prefix_salt,
    )


def encode_verdict(results: dict[AttemptRef, NewsResult]) -> worker_pb2.SessionRequest:
    return worker_pb2.SessionRequest(
        verdict=worker_pb2.Verdict(
            attempts=[
                worker_pb2.AttemptVerdict(
                    attempt=encode_ref(ref), action=_ACTIONS[result.verdict], resend_from=result.resend_from
                )
                for ref, result in results.items()
            ]
        )
    )
