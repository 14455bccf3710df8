"""When to come back after a failed call, and which failures are worth it. Pure: no clock, no randomness of its own."""

from dataclasses import dataclass
from datetime import timedelta

import grpc

from service_kit.rpc_status import RpcFailure

_TRANSPORT_CODES = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})
_TRANSPORT_TEXTS = ("RST_STREAM", "Stream removed", "GOAWAY", "Socket closed", "connection")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Jittered exponential back-off. `give_up_after` counts from the first failure since the last sign of progress."""

    first_delay: timedelta = timedelta(milliseconds=100)
    max_delay: timedelta = timedelta(seconds=5)
    give_up_after: timedelta = timedelta(seconds=120)

    def delay_s(self, failures: int, retry_after: timedelta | None, jitter: float) -> float:
        """Seconds to wait after the `failures`-th failure in a row; `jitter` is uniform in [0, 1).

        Never before `retry_after`, which the server asked for; the jitter on top spreads clients that failed together.
        """
        first, most = self.first_delay.total_seconds(), self.max_delay.total_seconds()
        bound = min(most, first * 2.0 ** min(failures - 1, 32))
        if retry_after is not None:
            return retry_after.total_seconds() + jitter * bound
        return bound * (0.5 + 0.5 * jitter)


def is_worth_retrying(failure: RpcFailure) -> bool:
    """Whether the same call may succeed later: the service said so, or the connection broke before it could say anything."""
    if failure.reason:
        return failure.code is grpc.StatusCode.UNAVAILABLE
    if failure.code in _TRANSPORT_CODES:
        return True
    is_vague = failure.code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
    return is_vague and any(text in failure.message for text in _TRANSPORT_TEXTS)
