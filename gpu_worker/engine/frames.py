"""What travels between the worker's service process and its engine process. Pure.

A frame is a 4-byte little-endian length and a msgpack array `[kind, ...]`. Its size is bounded on both sides; bytes that
are no frame are an error, after which the connection is of no use any more.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from operator import attrgetter
from typing import Any, assert_never

import msgpack  # type: ignore[import-untyped]

from gpu_worker.engine.port import (
    CacheChanges,
    Capabilities,
    LoadReport,
    SequenceFinish,
    SequenceOutput,
    SequenceSpec,
    StepOutput,
    Timings,
)
from service_kit.delta import Delta
from service_kit.logprob_codec import pack_logprobs, unpack_logprobs
from service_kit.sampling import FinishReason, SamplingParams

MAX_FRAME_BYTES = 64 << 20
HEADER = struct.Struct("<I")
# Part of every step's frame. Their fields are plain values, which astuple would look for dataclasses in and copy.
_LOAD_FIELDS = attrgetter(*LoadReport.__dataclass_fields__)
_CHANGES_FIELDS = attrgetter(*CacheChanges.__dataclass_fields__)


class BrokenFrameError(Exception):
    """Bytes that are not a frame, or a frame beyond the size limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddFrame:
    """Service to engine: take these sequences in."""

    specs: tuple[SequenceSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortFrame:
    """Service to engine: end these sequences."""

    sequence_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AckFrame:
    """Service to engine: output frames up to this step are taken."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyFrame:
    """Engine to service, once: loaded and warmed up."""

    capabilities: Capabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFrame:
    """Engine to service: one step. `num_pauses` counts how often the engine had to wait for acknowledgements."""

    output: StepOutput
    load: LoadReport
    num_pauses: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedFrame:
    """Engine to service: this sequence can never run."""

    sequence_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FatalFrame:
    """Engine to service, last: the engine ends, and why."""

    reason: str


Frame = AddFrame | AbortFrame | AckFrame | ReadyFrame | OutputFrame | RefusedFrame | FatalFrame


def encode_frame(frame: Frame) -> bytes:
    """Header and body. Raises BrokenFrameError when the frame is too large."""
    match frame:
        case AddFrame():
            fields: list[Any] = ["add", [_spec_fields(spec) for spec in frame.specs]]
        case AbortFrame():
            fields = ["abort", frame.sequence_ids]
        case AckFrame():
            fields = ["ack", frame.step]
        case ReadyFrame():
            fields = ["ready", astuple(frame.capabilities)]
        case OutputFrame():
            outputs = [_output_fields(output) for output in frame.output.outputs]
            changes = _CHANGES_FIELDS(frame.output.cache_changes)
            fields = ["output", frame.output.step, outputs, changes, _LOAD_FIELDS(frame.load), frame.num_pauses]
        case RefusedFrame():
            fields = ["refused", frame.sequence_id, frame.reason]
        case FatalFrame():
            fields = ["fatal", frame.reason]
        case _:
            assert_never(frame)
    body: bytes = msgpack.packb(fields)
    if len(body) > MAX_FRAME_BYTES:
        raise BrokenFrameError(f"a frame of {len(body)} bytes exceeds {MAX_FRAME_BYTES}")
    return HEADER.pack(len(body)) + body


def decode_body(body: bytes) -> Frame:
    """The frame of a body without its header. Raises BrokenFrameError."""
    try:
        kind, *fields = msgpack.unpackb(body, use_list=False)
        frame: Frame = _DECODERS[kind](fields)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, msgpack.UnpackException) as error:
        raise BrokenFrameError(f"not a frame: {error!r}") from error
    return frame


def body_length(header: bytes) -> int:
    """Length of the body behind a header. Raises BrokenFrameError."""
    (length,) = HEADER.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise BrokenFrameError(f"a frame of {length} bytes exceeds {MAX_FRAME_BYTES}")
    return int(length)


class FrameReader:
    """Puts frames together from the pieces in which a stream delivers them."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are complete now. Raises BrokenFrameError."""
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            end = HEADER.size + body_length(bytes(self._buffer[: HEADER.size]))
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[HEADER.size : end])
            del self._buffer[:end]
            yield decode_body(body)

    @property
    def is_inside_frame(self) -> bool:
        """Whether the stream would end in the middle of a frame if it ended here."""
        return bool(self._buffer)


def _spec_fields(spec: SequenceSpec) -> list[Any]:
    tokens = (spec.prompt_token_ids, spec.output_token_ids)
    return [spec.sequence_id, *tokens, spec.sampling.to_dict(), spec.priority, spec.nonce, spec.prefix_salt]


def _spec(fields: Sequence[Any]) -> SequenceSpec:
    sequence_id, prompt, output, sampling, priority, nonce, prefix_salt = fields
    return SequenceSpec(
        sequence_id=sequence_id,
        prompt_token_ids=prompt,
        output_token_ids=output,
        sampling=SamplingParams.from_dict(sampling),
        priority=priority,
        nonce=nonce,
        prefix_salt=prefix_salt,
    )


def _output_fields(output: SequenceOutput) -> list[Any]:
    delta, finish = output.delta, output.finish
    return [
        output.sequence_id,
        None if delta is None else _delta_fields(delta),
        None if finish is None else astuple(finish),
    ]


def _output(fields: Sequence[Any]) -> SequenceOutput:
    sequence_id, delta, finish = fields
    return SequenceOutput(
        sequence_id=sequence_id,
        delta=None if delta is None else _delta(delta),
        finish=None if finish is None else _finish(finish),
    )


def _delta_fields(delta: Delta) -> list[Any]:
    logprobs = pack_logprobs(delta.logprobs) if delta.logprobs else None
    return [delta.first, delta.token_ids, delta.texts, delta.prev_chain, delta.chain, logprobs]


def _delta(fields: Sequence[Any]) -> Delta:
    first, token_ids, texts, prev_chain, chain, logprobs = fields
    return Delta(
        first=first,
        token_ids=token_ids,
        texts=texts,
        prev_chain=prev_chain,
        chain=chain,
        logprobs=unpack_logprobs(logprobs) if logprobs is not None else (),
    )


def _finish(fields: Sequence[Any]) -> SequenceFinish:
    prompt_tokens, cached, output_tokens, timings, reason, failure, matched_stop = fields
    added, prefill_started, first_token, finished = timings
    return SequenceFinish(
        prompt_tokens=prompt_tokens,
        cached_prompt_tokens=cached,
        output_tokens=output_tokens,
        timings=Timings(added=added, prefill_started=prefill_started, first_token=first_token, finished=finished),
        reason=None if reason is None else FinishReason(reason),
        failure=failure,
        matched_stop=matched_stop,
    )


def _by_name(kind: type[Any], values: Sequence[Any]) -> Any:
    """A dataclass of plain values (tuples of them included) from these in field order."""
    return kind(**dict(zip(kind.__dataclass_fields__, values, strict=True)))


def _decode_output(fields: Sequence[Any]) -> OutputFrame:
    step, outputs, changes, load, num_pauses = fields
    output = StepOutput(
        step=step,
        outputs=tuple(_output(each) for each in outputs),
        cache_changes=_by_name(CacheChanges, changes),
    )
    return OutputFrame(output=output, load=_by_name(LoadReport, load), num_pauses=num_pauses)


_DECODERS: dict[str, Any] = {
    "add": lambda fields: AddFrame(specs=tuple(_spec(spec) for spec in fields[0])),
    "abort": lambda fields: AbortFrame(sequence_ids=fields[0]),
    "ack": lambda fields: AckFrame(step=int(fields[0])),
    "ready": lambda fields: ReadyFrame(capabilities=_by_name(Capabilities, fields[0])),
    "output": _decode_output,
    "refused": lambda fields: RefusedFrame(sequence_id=fields[0], reason=fields[1]),
    "fatal": lambda fields: FatalFrame(reason=fields[0]),
}
