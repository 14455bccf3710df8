"""Domain ↔ public protos. Pure."""

from collections.abc import Sequence
from datetime import datetime

from google.protobuf.timestamp_pb2 import Timestamp

from gateway.model_registry import ServedModel
from gateway.streaming.pieces import Piece
from inference.v1 import types_pb2
from service_kit.delta import Cursor, Delta
from service_kit.errors import AbortedError, ExpiredError, InternalError, Reason, SluiceError
from service_kit.sampling import FinishReason
from state_store.delta_log.port import LogEnd
from state_store.model import GenerationRow, PriorityClass, State

_STATES = {state: types_pb2.GenerationState.Value(f"GENERATION_STATE_{state.value}") for state in State}
_CLASSES = {priority: types_pb2.PriorityClass.Value(f"PRIORITY_CLASS_{priority.value}") for priority in PriorityClass}
_FINISH_REASONS = {reason: types_pb2.FinishReason.Value(f"FINISH_REASON_{reason.value}") for reason in FinishReason}


def encode_state(state: State) -> types_pb2.GenerationState.ValueType:
    return _STATES[state]


def encode_cursor(cursor: Cursor) -> types_pb2.Cursor:
    return types_pb2.Cursor(sequence_number=cursor.sequence_number, chain=cursor.chain)


def encode_piece(piece: Piece, token_bytes: Sequence[bytes] = ()) -> types_pb2.Delta:
    """One delta message; with the end's finish reason and usage when the generation ended well or was cancelled.

    `token_bytes`, by token id, go with log probabilities.
    """
    message = types_pb2.Delta(cursor=encode_cursor(piece.cursor))
    if piece.delta is not None:
        message.first_sequence_number = piece.delta.first
        message.token_ids.extend(piece.delta.token_ids)
        message.text = piece.delta.text
        message.logprobs.extend(_encode_logprobs(piece.delta, token_bytes))
    end = piece.end
    if end is not None and end_error(end) is None:
        message.finish_reason = _finish_reason(end)
        message.usage.CopyFrom(_encode_usage(end))
        if end.matched_stop is not None:
            message.matched_stop = end.matched_stop
    return message


def is_worth_sending(piece: Piece) -> bool:
    """A piece that only says that a generation failed is no message: the status says it."""
    return piece.delta is not None or (piece.end is not None and end_error(piece.end) is None)


def end_error(end: LogEnd) -> SluiceError | None:
    """The status that ends the stream of a failed or expired generation; None for the others."""
    match end.state:
        case State.FAILED if end.error_reason == Reason.ATTEMPTS_EXHAUSTED:
            return AbortedError(end.error_message or "all attempts failed", reason=Reason.ATTEMPTS_EXHAUSTED)
        case State.FAILED:
            return InternalError(end.error_message or "the generation failed", reason=end.error_reason)
        case State.EXPIRED:
            return ExpiredError(end.error_message or "the generation expired", reason=end.error_reason)
        case _:
            return None


def _finish_reason(end: LogEnd) -> types_pb2.FinishReason.ValueType:
    if end.state is State.CANCELLED:
        return types_pb2.FINISH_REASON_CANCELLED
    return _FINISH_REASONS[FinishReason(end.finish_reason)] if end.finish_reason else types_pb2.FINISH_REASON_STOP


def _encode_usage(end: LogEnd) -> types_pb2.Usage:
    return types_pb2.Usage(
        prompt_tokens=end.prompt_tokens,
        cached_prompt_tokens=end.cached_prompt_tokens,
        output_tokens=end.output_tokens,
    )


def encode_record(record: GenerationRow, *, output_tokens: int | None = None) -> types_pb2.Generation:
    """The record without output. `output_tokens`: what the log knows of a live one."""
    is_final = record.state.is_terminal
    message = types_pb2.Generation(
        generation_id=record.generation_id,
        request_id=record.request_id,
        model=record.model,
        model_revision=record.model_key.revision,
        precision=record.model_key.precision,
        priority_class=_CLASSES[record.priority_class],
        state=_STATES[record.state],
        attempts=record.attempt,
        create_time=_timestamp(record.created_at),
        seed=record.seed,
        usage=types_pb2.Usage(
            prompt_tokens=record.num_prompt_tokens,
            cached_prompt_tokens=record.cached_prompt_tokens,
            output_tokens=record.output_tokens if is_final or output_tokens is None else output_tokens,
        ),
        is_final=is_final,
    )
    if record.started_at is not None:
        message.start_time.CopyFrom(_timestamp(record.started_at))
    if record.finished_at is not None:
        message.end_time.CopyFrom(_timestamp(record.finished_at))
    if record.finish_reason is not None:
        message.finish_reason = _FINISH_REASONS[record.finish_reason]
    elif record.state is State.CANCELLED:
        message.finish_reason = types_pb2.FINISH_REASON_CANCELLED
    if is_final and record.state is not State.SUCCEEDED:
        message.error.CopyFrom(_encode_error(record))
    if record.texts_deleted_at is not None:
        message.texts_delete_time.CopyFrom(_timestamp(record.texts_deleted_at))
    return message


def _encode_error(record: GenerationRow) -> types_pb2.GenerationError:
    """The reason of a bug of ours goes out, its text stays in."""
    reason = record.error_reason or (record.cancel_cause.value if record.cancel_cause else record.state.value)
    is_internal = record.state is State.FAILED and reason != Reason.ATTEMPTS_EXHAUSTED
    return types_pb2.GenerationError(reason=reason, message="" if is_internal else (record.error_message or ""))


def add_output(message: types_pb2.Generation, output: Delta | None, token_bytes: Sequence[bytes] = ()) -> None:
    """Adds the whole output so far, which begins at 1."""
    if output is None:
        return
    message.text = output.text
    message.token_ids.extend(output.token_ids)
    message.logprobs.extend(_encode_logprobs(output, token_bytes))
    message.cursor.CopyFrom(encode_cursor(output.end))


def _encode_logprobs(delta: Delta, token_bytes: Sequence[bytes]) -> list[types_pb2.TokenLogprob]:
    def bytes_of(token_id: int) -> bytes:
        return token_bytes[token_id] if token_id < len(token_bytes) else b""

    return [
        types_pb2.TokenLogprob(
            logprob=each.logprob,
            token=bytes_of(output_id),
            top=[
                types_pb2.TopLogprob(token_id=token_id, logprob=logprob, token=bytes_of(token_id))
                for token_id, logprob in each.top
            ],
        )
        for output_id, each in zip(delta.token_ids, delta.logprobs, strict=False)  # all of them, or none
    ]


def encode_model(model: ServedModel, *, workers: int) -> types_pb2.Model:
    manifest = model.manifest
    return types_pb2.Model(
        model=manifest.model,
        revision=manifest.revision,
        precision=manifest.precision,
        context_length=manifest.context_length,
        vocab_size=manifest.vocab_size,
        workers=workers,
    )


def _timestamp(moment: datetime) -> Timestamp:
    timestamp = Timestamp()
    timestamp.FromDatetime(moment)
    return timestamp
