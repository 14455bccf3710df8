"""Between the public protos and the client's own types."""

from collections.abc import Sequence
from datetime import timedelta

from google.protobuf.duration_pb2 import Duration

from inference.v1 import inference_pb2, types_pb2
from service_kit.delta import Cursor
from service_kit.errors import InternalError, InvalidArgumentError
from service_kit.sampling import FinishReason
from sluice.client_events import (
    Accepted,
    Event,
    Finished,
    Input,
    Message,
    Output,
    Sampling,
    StreamBrokenError,
    TokenLogprob,
    TopLogprob,
    continue_from,
)

StreamResponse = inference_pb2.GenerateResponse | inference_pb2.StreamGenerationResponse

_FINISH_REASONS = {
    types_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    types_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    types_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
}


def spec_to_proto(model: str, source: Input, sampling: Sampling, priority_class: str) -> types_pb2.GenerationSpec:
    """The request's identity. Raises InvalidArgumentError."""
    spec = types_pb2.GenerationSpec(model=model, sampling=_sampling_to_proto(sampling))
    try:
        spec.priority_class = types_pb2.PriorityClass.Value(f"PRIORITY_CLASS_{priority_class.upper()}")
    except ValueError:
        raise InvalidArgumentError("priority_class", "must be interactive, standard or batch") from None
    if isinstance(source, str):
        spec.prompt = source
        return spec
    if not source:
        raise InvalidArgumentError("input", "must not be empty")
    for item in source:
        if isinstance(item, Message):
            spec.chat.messages.add(role=item.role, content=item.content)
        else:
            spec.token_ids.ids.append(item)
    return spec


def _sampling_to_proto(sampling: Sampling) -> types_pb2.Sampling:
    return types_pb2.Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        max_output_tokens=sampling.max_output_tokens,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        min_output_tokens=sampling.min_output_tokens,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=[
            types_pb2.LogitBias(token_id=token_id, bias=bias) for token_id, bias in sampling.logit_bias.items()
        ],
        include_stop=sampling.include_stop,
        logprobs=sampling.logprobs,
    )


def delivery_to_proto(
    grace: timedelta | None, queue_timeout: timedelta | None, deadline: timedelta | None, *, store: bool | None = None
) -> types_pb2.Delivery:
    """None leaves a value to the server's default."""
    return types_pb2.Delivery(
        grace=_duration(grace), queue_timeout=_duration(queue_timeout), deadline=_duration(deadline), store=store
    )


def _duration(value: timedelta | None) -> Duration | None:
    if value is None:
        return None
    duration = Duration()
    duration.FromTimedelta(value)
    return duration


def cursor_to_proto(cursor: Cursor) -> types_pb2.Cursor | None:
    """None for a reader that has nothing."""
    if cursor.sequence_number == 0:
        return None
    return types_pb2.Cursor(sequence_number=cursor.sequence_number, chain=cursor.chain)


def cursor_from_proto(cursor: types_pb2.Cursor) -> Cursor:
    return Cursor(sequence_number=cursor.sequence_number, chain=cursor.chain)


def state_name(state: int) -> str:
    """QUEUED, RUNNING, SUCCEEDED, FAILED, CANCELLED or EXPIRED."""
    return types_pb2.GenerationState.Name(state).removeprefix("GENERATION_STATE_")  # type: ignore[arg-type]


def accepted_from_proto(accepted: types_pb2.Accepted) -> Accepted:
    return Accepted(
        generation_id=accepted.generation_id,
        request_id=accepted.request_id,
        is_created=accepted.created,
        state=state_name(accepted.state),
        prompt_tokens=accepted.prompt_tokens,
    )


def logprobs_from_proto(
    token_ids: Sequence[int], logprobs: Sequence[types_pb2.TokenLogprob]
) -> tuple[TokenLogprob, ...]:
    """Of the tokens of one delta, or of a whole record. Raises StreamBrokenError when only some tokens have any."""
    if logprobs and len(logprobs) != len(token_ids):
        raise StreamBrokenError(f"{len(token_ids)} tokens came with {len(logprobs)} log probabilities")
    return tuple(
        TokenLogprob(
            token_id=token_id,
            token=each.token,
            logprob=each.logprob,
            top=tuple(
                TopLogprob(token_id=other.token_id, token=other.token, logprob=other.logprob) for other in each.top
            ),
        )
        for token_id, each in zip(token_ids, logprobs, strict=False)
    )


def events_from_delta(delta: types_pb2.Delta, cursor: Cursor) -> list[Event]:
    """The events of one delta for a reader at `cursor`. Raises StreamBrokenError when it does not continue there."""
    events: list[Event] = []
    if delta.token_ids:
        end = cursor_from_proto(delta.cursor)
        reached = continue_from(cursor, first=delta.first_sequence_number, token_ids=delta.token_ids, end=end)
        logprobs = logprobs_from_proto(delta.token_ids, delta.logprobs)
        events.append(Output(token_ids=tuple(delta.token_ids), text=delta.text, cursor=reached, logprobs=logprobs))
    elif delta.text:
        events.append(Output(token_ids=(), text=delta.text, cursor=cursor))
    if delta.finish_reason != types_pb2.FINISH_REASON_UNSPECIFIED:
        if delta.finish_reason not in _FINISH_REASONS:
            raise InternalError(
                f"the server ended with a finish reason that this client does not know: {delta.finish_reason}"
            )
        events.append(
            Finished(
                finish_reason=_FINISH_REASONS[delta.finish_reason],
                prompt_tokens=delta.usage.prompt_tokens,
                cached_prompt_tokens=delta.usage.cached_prompt_tokens,
                output_tokens=delta.usage.output_tokens,
                matched_stop=delta.matched_stop if delta.HasField("matched_stop") else None,
            )
        )
    return events
