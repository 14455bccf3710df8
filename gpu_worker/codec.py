"""Between the session's values and `inference.internal.v1` messages. Raises InvalidArgumentError naming the field."""

from collections.abc import Iterable

from gpu_worker.attempts import Assignment, AttemptNews, AttemptRef, HeldAttempt, VerdictAction
from gpu_worker.engine.port import Capabilities, LoadReport, SequenceFinish
from gpu_worker.session_stream import BatchMessage, EngineLostMessage, OutgoingMessage, StateMessage
from inference.internal.v1 import worker_pb2
from service_kit.errors import InvalidArgumentError
from service_kit.ids import GenerationId, SessionId
from service_kit.sampling_codec import decode_sampling, encode_logprobs

_ACTIONS = {
    worker_pb2.VERDICT_ACTION_KEEP: VerdictAction.KEEP,
    worker_pb2.VERDICT_ACTION_RESEND_FROM: VerdictAction.RESEND_FROM,
    worker_pb2.VERDICT_ACTION_ABORT: VerdictAction.ABORT,
}


def decode_ref(message: worker_pb2.AttemptRef) -> AttemptRef:
    if not message.generation_id or message.attempt < 1:
        raise InvalidArgumentError("attempt", "names no attempt")
    return AttemptRef(generation_id=GenerationId(message.generation_id), attempt=message.attempt)


def decode_refs(messages: Iterable[worker_pb2.AttemptRef]) -> list[AttemptRef]:
    return [decode_ref(message) for message in messages]


def decode_assignment(message: worker_pb2.Assignment, ref: AttemptRef) -> Assignment:
    return Assignment(
        ref=ref,
        prompt_token_ids=tuple(message.prompt_token_ids),
        output_token_ids=tuple(message.output_token_ids),
        sampling=decode_sampling(message.sampling, field="assign.assignments.sampling"),
        priority=message.priority,
        nonce=message.nonce,
        traceparent=message.traceparent,
        prefix_salt=message.prefix_salt,
    )


def decode_verdict(message: worker_pb2.AttemptVerdict) -> tuple[AttemptRef, VerdictAction, int]:
    """The attempt, what to do with it, and the first sequence number to send again."""
    action = _ACTIONS.get(message.action)
    if action is None:
        raise InvalidArgumentError("verdict.attempts.action", "is not set")
    return decode_ref(message.attempt), action, message.resend_from


def encode_outgoing(
    message: OutgoingMessage, *, session_id: SessionId, capabilities: Capabilities
) -> worker_pb2.SessionResponse:
    match message:
        case BatchMessage():
            response = worker_pb2.SessionResponse()
            # Filled where it stands: a message that is put into another one is copied, with all that is in it.
            batch = response.delta_batch
            batch.batch = message.batch
            add = batch.deltas.add
            for news in message.news:
                _fill_delta(add(), news)
            return response
        case StateMessage(is_hello=True):
            hello = worker_pb2.Hello(
                session_id=session_id,
                capabilities=encode_capabilities(capabilities),
                load=_encode_load(message.load, is_draining=message.is_draining),
                held=[_encode_held(held) for held in message.held],
                cached_prefixes=message.prefixes.added,
            )
            return worker_pb2.SessionResponse(hello=hello)
        case StateMessage():
            heartbeat = worker_pb2.Heartbeat(
                load=_encode_load(message.load, is_draining=message.is_draining),
                held=[_encode_held(held) for held in message.held],
                cached_prefixes_added=message.prefixes.added,
                cached_prefixes_removed=message.prefixes.removed,
            )
            return worker_pb2.SessionResponse(heartbeat=heartbeat)
        case EngineLostMessage():
            lost = worker_pb2.EngineLost(
                is_step_known=message.untried is not None, untried=[_encode_ref(ref) for ref in message.untried or ()]
            )
            return worker_pb2.SessionResponse(engine_lost=lost)


def encode_capabilities(capabilities: Capabilities) -> worker_pb2.WorkerCapabilities:
    return worker_pb2.WorkerCapabilities(
        engine=capabilities.engine,
        model=capabilities.model,
        model_revision=capabilities.model_revision,
        precision=capabilities.precision,
        context_length=capabilities.context_length,
        vocab_size=capabilities.vocab_size,
        num_blocks=capabilities.num_blocks,
        block_size=capabilities.block_size,
        max_running=capabilities.max_running,
        is_batch_invariant=capabilities.is_batch_invariant,
        kv_dtype=capabilities.kv_dtype,
    )


def _encode_ref(ref: AttemptRef) -> worker_pb2.AttemptRef:
    return worker_pb2.AttemptRef(generation_id=ref.generation_id, attempt=ref.attempt)


def _encode_held(held: HeldAttempt) -> worker_pb2.HeldAttempt:
    return worker_pb2.HeldAttempt(attempt=_encode_ref(held.ref), position=held.position, is_finished=held.is_finished)


def _encode_load(load: LoadReport, *, is_draining: bool) -> worker_pb2.LoadReport:
    return worker_pb2.LoadReport(
        step=load.step,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_free_blocks=load.num_free_blocks,
        num_blocks=load.num_blocks,
        block_size=load.block_size,
        largest_batch=load.largest_batch,
        kv_waste=load.kv_waste,
        num_preempted=load.num_preempted,
        is_draining=is_draining,
        room_blocks=load.room_blocks,
        num_cached_blocks=load.num_cached_blocks,
        num_computed_prompt_tokens=load.num_computed_prompt_tokens,
        num_cached_prompt_tokens=load.num_cached_prompt_tokens,
        num_blocks_to_host=load.num_blocks_to_host,
        num_blocks_from_host=load.num_blocks_from_host,
        num_failed=load.num_failed,
        num_draft_steps=load.num_draft_steps,
        num_draft_tokens=load.num_draft_tokens,
        num_accepted_draft_tokens=load.num_accepted_draft_tokens,
        is_speculating=load.is_speculating,
        num_speculation_stops=load.num_speculation_stops,
    )


def _fill_delta(message: worker_pb2.AttemptDelta, news: AttemptNews) -> None:
    attempt, delta = message.attempt, news.delta
    attempt.generation_id = news.ref.generation_id
    attempt.attempt = news.ref.attempt
    if delta is not None:
        message.first = delta.first
        message.token_ids.extend(delta.token_ids)
        message.texts.extend(delta.texts)
        message.prev_chain = delta.prev_chain
        message.chain = delta.chain
        if delta.logprobs:
            message.logprobs.extend(encode_logprobs(delta.logprobs))
    if news.end is not None:
        message.end.CopyFrom(_encode_end(news.end))


def _encode_end(end: SequenceFinish) -> worker_pb2.AttemptEnd:
    return worker_pb2.AttemptEnd(
        finish_reason=end.reason.value if end.reason is not None else "",
        failure=end.failure or "",
        matched_stop=end.matched_stop,
        output_tokens=end.output_tokens,
        cached_prompt_tokens=end.cached_prompt_tokens,
    )
