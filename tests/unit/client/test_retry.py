from datetime import timedelta

import grpc
import pytest

from service_kit.rpc_status import RpcFailure
from sluice.retry import RetryPolicy, is_worth_retrying

POLICY = RetryPolicy(first_delay=timedelta(seconds=1), max_delay=timedelta(seconds=8))


def test_the_delay_doubles_up_to_its_bound_and_jitter_takes_at_most_half() -> None:
    assert [POLICY.delay_s(failures, None, 0.0) for failures in (1, 2, 3, 4, 5, 10_000)] == [0.5, 1, 2, 4, 4, 4]
    assert POLICY.delay_s(2, None, 0.999) == pytest.approx(2, abs=0.01)


def test_the_delay_is_never_shorter_than_the_server_asked_for() -> None:
    assert POLICY.delay_s(1, timedelta(seconds=30), 0.0) == 30
    assert POLICY.delay_s(1, timedelta(seconds=30), 0.5) == 30.5


@pytest.mark.parametrize(
    ("code", "reason", "message", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, "", "", True),
        (grpc.StatusCode.UNAVAILABLE, "QUEUE_FULL", "", True),
        (grpc.StatusCode.CANCELLED, "", "", True),
        (grpc.StatusCode.INTERNAL, "", "Received RST_STREAM with error code 2", True),
        (grpc.StatusCode.UNKNOWN, "", "Stream removed", True),
        (grpc.StatusCode.INTERNAL, "INTERNAL", "Received RST_STREAM", False),
        (grpc.StatusCode.INTERNAL, "", "Exception deserializing response", False),
        (grpc.StatusCode.UNIMPLEMENTED, "", "connection", False),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED", "", False),
        (grpc.StatusCode.DATA_LOSS, "OUTPUT_CONTRADICTED", "", False),
    ],
)
def test_only_what_may_pass_is_retried(code: grpc.StatusCode, reason: str, message: str, expected: bool) -> None:
    assert is_worth_retrying(RpcFailure(code=code, reason=reason, message=message)) is expected
