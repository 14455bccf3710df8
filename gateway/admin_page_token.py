"""Opaque tokens that continue administrators' lists. Pure."""

import base64
import binascii
import json
from collections.abc import Sequence

from service_kit.errors import InvalidArgumentError

_VERSION = 1


def encode_admin_token(position: str, filters: Sequence[str]) -> str:
    """Continues behind `position`; bound to the list and filter it was made with."""
    return base64.urlsafe_b64encode(json.dumps([_VERSION, position, list(filters)]).encode()).decode().rstrip("=")


def decode_admin_token(token: str, filters: Sequence[str]) -> str | None:
    """None for the first page. Raises InvalidArgumentError."""
    if not token:
        return None
    try:
        version, position, token_filters = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
    except (ValueError, TypeError, RecursionError, binascii.Error):
        raise InvalidArgumentError("page_token", "is no page token") from None
    if version != _VERSION or not isinstance(position, str) or not position.isprintable():
        raise InvalidArgumentError("page_token", "is no page token")
    if token_filters != list(filters):
        raise InvalidArgumentError("page_token", "was made with another filter")
    return position
