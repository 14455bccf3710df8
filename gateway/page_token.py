"""Opaque tokens that continue a list. Pure."""

import base64
import binascii
import json
from collections.abc import Sequence

from service_kit.errors import InvalidArgumentError
from service_kit.ids import GenerationId, is_generation_id
from state_store.model import State

_VERSION = 1


def encode_page_token(before: GenerationId, states: Sequence[State]) -> str:
    """Continues below `before`; bound to the filter it was made with."""
    fields = [_VERSION, before, [state.value for state in states]]
    return base64.urlsafe_b64encode(json.dumps(fields).encode()).decode().rstrip("=")


def decode_page_token(token: str, states: Sequence[State]) -> GenerationId | None:
    """None for the first page. Raises InvalidArgumentError."""
    if not token:
        return None
    try:
        fields = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        version, before, token_states = fields
    except (ValueError, TypeError, RecursionError, binascii.Error):
        raise InvalidArgumentError("page_token", "is no page token") from None
    if version != _VERSION or not isinstance(before, str) or not is_generation_id(before):
        raise InvalidArgumentError("page_token", "is no page token")
    if token_states != [state.value for state in states]:
        raise InvalidArgumentError("page_token", "was made with other states")
    return GenerationId(before)
