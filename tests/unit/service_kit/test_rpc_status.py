from datetime import timedelta

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2

from service_kit.errors import (
    AbortedError,
    AlreadyExistsError,
    DataLossError,
    ExpiredError,
    FailedPreconditionError,
    FieldViolation,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    PermissionDeniedError,
    QuotaExceededError,
    Reason,
    SluiceError,
    UnauthenticatedError,
    UnavailableError,
    WorkerDiffersError,
)
from service_kit.rpc_status import CODE_BY_ERROR, RpcFailure, failure_from_status, to_error, to_status

CODES = {code.value[0]: code for code in grpc.StatusCode}
CASES: list[tuple[SluiceError, int, set[str]]] = [
    (UnauthenticatedError("no"), code_pb2.UNAUTHENTICATED, set()),
    (PermissionDeniedError("no"), code_pb2.PERMISSION_DENIED, set()),
    (
        InvalidArgumentError("a.b", "bad", more=[FieldViolation(field="c", description="too")]),
        code_pb2.INVALID_ARGUMENT,
        {"BadRequest"},
    ),
    (
        QuotaExceededError("full", subject="tenant:t:rate", retry_after=timedelta(seconds=3)),
        code_pb2.RESOURCE_EXHAUSTED,
        {"QuotaFailure", "RetryInfo"},
    ),
    (UnavailableError("away", retry_after=timedelta(milliseconds=250)), code_pb2.UNAVAILABLE, {"RetryInfo"}),
    (AlreadyExistsError("reused"), code_pb2.ALREADY_EXISTS, set()),
    (NotFoundError("none", metadata={"generation_id": "g"}), code_pb2.NOT_FOUND, set()),
    (OutOfRangeError("beyond"), code_pb2.OUT_OF_RANGE, set()),
    (ExpiredError("late", reason=Reason.QUEUE_TIMEOUT), code_pb2.DEADLINE_EXCEEDED, set()),
    (AbortedError("used up", reason=Reason.ATTEMPTS_EXHAUSTED), code_pb2.ABORTED, set()),
    (FailedPreconditionError("no"), code_pb2.FAILED_PRECONDITION, set()),
    (DataLossError("other"), code_pb2.DATA_LOSS, set()),
    (InternalError("secret text"), code_pb2.INTERNAL, {"RequestInfo"}),
]


def test_a_worker_that_differs_from_its_peers_hears_in_which_field() -> None:
    error = WorkerDiffersError("capabilities.kv_dtype", "is float16", metadata={"session_id": "s"})
    status = to_status(error, request_id="r")
    failure = failure_from_status(status, code=CODES[status.code])
    assert (failure.code, failure.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "WORKER_DIFFERS")
    assert failure.message == "capabilities.kv_dtype: is float16"
    assert failure.metadata == {"field": "capabilities.kv_dtype", "session_id": "s"}


def test_every_type_of_the_table_is_covered_here() -> None:
    assert {type(error) for error, _, _ in CASES} == set(CODE_BY_ERROR)


@pytest.mark.parametrize(("error", "code", "details"), CASES, ids=lambda value: type(value).__name__)
def test_each_error_has_its_code_its_details_and_exactly_one_error_info(
    error: SluiceError, code: int, details: set[str]
) -> None:
    status = to_status(error, request_id="r1")
    names = [packed.TypeName().rsplit(".", 1)[1] for packed in status.details]
    assert status.code == code
    assert sorted(names) == sorted(["ErrorInfo", *details])
    info = error_details_pb2.ErrorInfo()
    status.details[names.index("ErrorInfo")].Unpack(info)
    assert (info.reason, info.domain, dict(info.metadata)) == (error.reason, "sluice", error.metadata)


@pytest.mark.parametrize(("error", "code", "details"), CASES, ids=lambda value: type(value).__name__)
def test_an_error_comes_back_from_its_status_as_it_was(error: SluiceError, code: int, details: set[str]) -> None:
    back = to_error(failure_from_status(to_status(error, request_id="r1"), code=CODES[code]))
    assert type(back) is type(error)
    assert back.reason == error.reason
    for name in ("violations", "subject", "retry_after", "metadata"):
        assert getattr(back, name, None) == getattr(error, name, None)


def test_a_subclass_has_the_code_of_the_type_it_refines() -> None:
    class StoreDownError(UnavailableError):
        default_reason = Reason.STORE_UNAVAILABLE

    status = to_status(StoreDownError("down"), request_id="r")
    assert status.code == code_pb2.UNAVAILABLE


def test_the_text_of_an_internal_error_stays_behind_and_its_request_id_goes_out() -> None:
    status = to_status(InternalError("secret text"), request_id="r42")
    assert b"secret" not in status.SerializeToString()
    assert failure_from_status(status, code=grpc.StatusCode.INTERNAL).request_id == "r42"


def test_an_error_of_no_known_type_is_internal() -> None:
    status = to_status(SluiceError("secret text"), request_id="r")
    assert status.code == code_pb2.INTERNAL
    assert b"secret" not in status.SerializeToString()


def test_long_texts_are_cut_so_that_the_status_fits_into_trailing_metadata() -> None:
    status = to_status(InvalidArgumentError("f", "x" * 100_000), request_id="r")
    assert len(status.SerializeToString()) < 4096


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, UnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, UnavailableError),
        (grpc.StatusCode.CANCELLED, UnavailableError),
        (grpc.StatusCode.UNIMPLEMENTED, InternalError),
    ],
)
def test_grpcs_own_errors_are_unavailable_when_transient_and_internal_otherwise(
    code: grpc.StatusCode, expected: type[SluiceError]
) -> None:
    assert type(to_error(RpcFailure(code=code, message="text"))) is expected
