"""The identity of a request: what two calls with one request_id must agree in. Pure."""

import hashlib
import json
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from inference.v1 import types_pb2

_LOGIT_BIAS = "inference.v1.Sampling.logit_bias"


def request_hash(spec: types_pb2.GenerationSpec) -> bytes:
    """SHA-256 over the canonical form of the parsed spec, 32 bytes.

    Canonical: the known fields that are set, by name, as JSON with sorted keys. Defaults are not applied, so unset
    differs from set to the default where the field tells them apart; fields this version does not know do not count, so a
    field that a later version adds changes no hash of a request without it.

    The same request has the same hash from any client: a 32-bit float counts as its value, the nearest one to what the
    client wrote, and token biases count in the order of their ids, since clients keep them in maps.
    """
    text = json.dumps(_canonical(spec), sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


def _canonical(message: Message) -> dict[str, Any]:
    return {field.name: _value(field, value) for field, value in message.ListFields()}


def _value(field: FieldDescriptor, value: Any) -> Any:
    if field.full_name == _LOGIT_BIAS:
        return sorted([each.token_id, each.bias + 0.0] for each in value)  # the sum makes 0 of -0
    is_message = field.type == FieldDescriptor.TYPE_MESSAGE
    if field.is_repeated:
        return [_canonical(item) for item in value] if is_message else list(value)
    return _canonical(value) if is_message else value
