"""The shared secret between Sluice's own services."""

import hmac
from typing import Any

from service_kit.errors import UnauthenticatedError
from service_kit.grpc_client import INTERNAL_TOKEN_KEY


class InternalAuth:
    """Refuses calls without the shared internal token; with no token configured it lets everybody in."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    def check(self, context: Any) -> None:
        """Raises UnauthenticatedError."""
        if self._token is None:
            return
        given = dict(context.invocation_metadata() or ()).get(INTERNAL_TOKEN_KEY, "")
        if not hmac.compare_digest(str(given).encode(), self._token.encode()):
            raise UnauthenticatedError("an internal call without the internal token")
