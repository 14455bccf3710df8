"""The public request, field by field, before anything is committed. Pure but for the protos it reads.

Errors name the field by its path in the proto.
"""

import re
from dataclasses import dataclass
from datetime import timedelta

from google.protobuf.duration_pb2 import Duration

from gateway.model_registry import ServedModel
from inference.v1 import inference_pb2, types_pb2
from service_kit.delta import EMPTY_CHAIN, Cursor
from service_kit.errors import InvalidArgumentError, Reason
from service_kit.ids import GenerationId, RequestId
from state_store.model import PriorityClass, State
from state_store.tenants import Tenant

MAX_PAGE_SIZE = 1000
DEFAULT_PAGE_SIZE = 50
DEFAULT_QUEUE_TIMEOUT = timedelta(minutes=10)
GRACE_AFTER_GENERATE = timedelta(seconds=30)
_MAX_TIMEOUT = timedelta(hours=24)
_UNLIMITED_GRACE = timedelta(days=36_500)
_MAX_SEQUENCE_NUMBER = (1 << 63) - 1
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\Z")
_NANOS_PER_SECOND = 1_000_000_000

_CLASSES = {
    types_pb2.PRIORITY_CLASS_INTERACTIVE: PriorityClass.INTERACTIVE,
    types_pb2.PRIORITY_CLASS_STANDARD: PriorityClass.STANDARD,
    types_pb2.PRIORITY_CLASS_BATCH: PriorityClass.BATCH,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryTimes:
    """How long the service keeps going; None is unlimited."""

    grace: timedelta | None
    queue_timeout: timedelta
    deadline: timedelta | None
    is_stored: bool = True
    """Whether prompt and output are kept beyond the grace period after the end."""


def parse_request_id(value: str) -> RequestId | None:
    """None when empty. Raises InvalidArgumentError."""
    if value and not _REQUEST_ID.match(value):
        raise InvalidArgumentError("request_id", "must be 1 to 128 of A-Z a-z 0-9 . _ : -")
    return RequestId(value) if value else None


def parse_cursor(message: types_pb2.Cursor) -> Cursor:
    if message.sequence_number > _MAX_SEQUENCE_NUMBER:
        raise InvalidArgumentError("cursor.sequence_number", "is no sequence number")
    if message.sequence_number > 0 and message.chain == EMPTY_CHAIN:
        raise InvalidArgumentError("cursor.chain", "must come with sequence_number: a continuation is verified")
    if message.sequence_number == 0 and message.chain != EMPTY_CHAIN:
        raise InvalidArgumentError("cursor.sequence_number", "must come with chain")
    return Cursor(sequence_number=message.sequence_number, chain=message.chain)


def parse_generation_ref(ref: inference_pb2.GenerationRef) -> GenerationId | RequestId:
    """Either id; see `is_generation_id` for which. Raises InvalidArgumentError."""
    match ref.WhichOneof("id"):
        case "generation_id":
            return _parse_generation_id(ref.generation_id)
        case "request_id":
            if not _REQUEST_ID.match(ref.request_id):
                raise InvalidArgumentError("generation.request_id", "must be 1 to 128 of A-Z a-z 0-9 . _ : -")
            return RequestId(ref.request_id)
        case _:
            raise InvalidArgumentError("generation.id", "must name a generation_id or a request_id")


def _parse_generation_id(text: str) -> GenerationId:
    if not _UUID.match(text):
        raise InvalidArgumentError("generation.generation_id", "is no generation id")
    return GenerationId(text.lower())


def parse_delivery(delivery: types_pb2.Delivery, *, default_grace: timedelta | None) -> DeliveryTimes:
    grace = default_grace
    if delivery.HasField("grace"):
        grace = _parse_duration("delivery.grace", delivery.grace)
        if grace >= _UNLIMITED_GRACE:
            # A century outlives every deadline of the service; the store keeps "no limit" as None.
            grace = None
    queue_timeout = DEFAULT_QUEUE_TIMEOUT
    if delivery.HasField("queue_timeout"):
        queue_timeout = _parse_timeout("delivery.queue_timeout", delivery.queue_timeout)
    deadline = _parse_timeout("delivery.deadline", delivery.deadline) if delivery.HasField("deadline") else None
    is_stored = delivery.store if delivery.HasField("store") else True
    return DeliveryTimes(grace=grace, queue_timeout=queue_timeout, deadline=deadline, is_stored=is_stored)


def _parse_timeout(field: str, duration: Duration) -> timedelta:
    value = _parse_duration(field, duration)
    if not timedelta(0) < value <= _MAX_TIMEOUT:
        raise InvalidArgumentError(field, "must be above 0 and at most 24 h")
    return value


def _parse_duration(field: str, duration: Duration) -> timedelta:
    if duration.seconds < 0 or not 0 <= duration.nanos < _NANOS_PER_SECOND:
        raise InvalidArgumentError(field, "must be a duration that is not negative")
    try:
        # Rounded up to microseconds: a positive duration stays positive.
        return timedelta(seconds=duration.seconds, microseconds=-(-duration.nanos // 1000))
    except OverflowError:
        raise InvalidArgumentError(field, "is out of range") from None


def parse_priority_class(value: int, tenant: Tenant) -> PriorityClass:
    """UNSPECIFIED is STANDARD, or the tenant's highest class where that is lower."""
    if value == types_pb2.PRIORITY_CLASS_UNSPECIFIED:
        return max(PriorityClass.STANDARD, tenant.max_class, key=lambda priority: priority.rank)
    priority = _CLASSES.get(value)  # type: ignore[call-overload]
    if priority is None:
        raise InvalidArgumentError("spec.priority_class", "is no class")
    if priority.rank < tenant.max_class.rank:
        raise InvalidArgumentError("spec.priority_class", f"this tenant's highest class is {tenant.max_class.value}")
    return PriorityClass(priority)


def parse_token_ids(message: types_pb2.TokenIds, model: ServedModel) -> tuple[int, ...]:
    if not message.ids:
        raise InvalidArgumentError("spec.token_ids.ids", "must not be empty")
    check_prompt_length("spec.token_ids", len(message.ids), model)
    token_ids = tuple(message.ids)
    if max(token_ids) >= (vocab_size := model.manifest.vocab_size):
        raise InvalidArgumentError("spec.token_ids.ids", f"token ids are below {vocab_size}")
    return token_ids


def check_prompt_length(field: str, num_tokens: int, model: ServedModel) -> None:
    """A prompt must leave room for at least one token of output."""
    limit = model.manifest.context_length - 1
    if num_tokens > limit:
        raise prompt_too_long(field, f"{num_tokens} tokens; this model takes at most {limit}", model)


def prompt_too_long(field: str, description: str, model: ServedModel) -> InvalidArgumentError:
    return InvalidArgumentError(
        field,
        description,
        reason=Reason.PROMPT_TOO_LONG,
        metadata={"context_length": str(model.manifest.context_length)},
    )


def parse_page_size(value: int) -> int:
    if value > MAX_PAGE_SIZE:
        raise InvalidArgumentError("page_size", f"must be from 1 to {MAX_PAGE_SIZE}")
    return value or DEFAULT_PAGE_SIZE


def parse_states(values: "list[types_pb2.GenerationState.ValueType]") -> tuple[State, ...]:
    """Sorted and without repeats."""
    names = {types_pb2.GenerationState.Name(value) for value in values if value in types_pb2.GenerationState.values()}
    known = {name.removeprefix("GENERATION_STATE_") for name in names} & set(State)
    if len(known) != len(set(values)):
        raise InvalidArgumentError("states", "names something that is no state")
    return tuple(sorted(State(name) for name in known))
