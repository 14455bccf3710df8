"""Who may call a server at all: asked once per call, before anything of the request is read."""

import time
from collections.abc import Callable, Iterable

import grpc

from service_kit.errors import SluiceError
from service_kit.logging import get_logger

Authorize = Callable[[Iterable[tuple[str, str | bytes]]], None]
"""Hears the metadata of a call; raises UnauthenticatedError."""

_HEALTH_PREFIX = "/grpc.health.v1."
_LOG_INTERVAL_S = 60.0
_log = get_logger()


class Gate:
    """Lets a call through, or says why not. Everybody may ask for health. Mutable state: what it has counted."""

    def __init__(self, authorize: Authorize | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._authorize = authorize
        self._clock = clock
        self._logged_at_s: float | None = None
        self.num_refused = 0

    def find_refusal(self, details: grpc.HandlerCallDetails) -> SluiceError | None:
        """None for a call that may go on."""
        method: str = details.method
        if self._authorize is None or method.startswith(_HEALTH_PREFIX):
            return None
        try:
            self._authorize(details.invocation_metadata or ())
        except SluiceError as error:
            self._count(method, error)
            return error
        return None

    def _count(self, method: str, error: SluiceError) -> None:
        self.num_refused += 1
        now_s = self._clock()
        if self._logged_at_s is None or now_s - self._logged_at_s >= _LOG_INTERVAL_S:
            self._logged_at_s = now_s
            _log.warning("call_refused", method=method, error=error.message, refused=self.num_refused)
