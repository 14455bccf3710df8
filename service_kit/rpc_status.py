"""The one table from domain errors to google.rpc.Status, and the way back on the client's side."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar, cast

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from service_kit.errors import (
    DEFAULT_RETRY_AFTER,
    ERROR_DOMAIN,
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
    RetryableError,
    SluiceError,
    UnauthenticatedError,
    UnavailableError,
)

MAX_TEXT_CHARS = 500
"""A status travels in trailing metadata, of which gRPC takes 8 KiB: longer texts would replace the error by another."""

_INTERNAL_TEXT = "internal error; the request id names it in the server's log"

CODE_BY_ERROR: Mapping[type[SluiceError], int] = {
    UnauthenticatedError: code_pb2.UNAUTHENTICATED,
    PermissionDeniedError: code_pb2.PERMISSION_DENIED,
    InvalidArgumentError: code_pb2.INVALID_ARGUMENT,
    QuotaExceededError: code_pb2.RESOURCE_EXHAUSTED,
    UnavailableError: code_pb2.UNAVAILABLE,
    AlreadyExistsError: code_pb2.ALREADY_EXISTS,
    NotFoundError: code_pb2.NOT_FOUND,
    OutOfRangeError: code_pb2.OUT_OF_RANGE,
    ExpiredError: code_pb2.DEADLINE_EXCEEDED,
    AbortedError: code_pb2.ABORTED,
    FailedPreconditionError: code_pb2.FAILED_PRECONDITION,
    DataLossError: code_pb2.DATA_LOSS,
    InternalError: code_pb2.INTERNAL,
}
_ERROR_BY_CODE = {code: error_type for error_type, code in CODE_BY_ERROR.items()}


def status_code(error: SluiceError) -> int:
    """google.rpc code of an error: that of the nearest type in the table."""
    for error_type in type(error).__mro__:
        if error_type in CODE_BY_ERROR:
            return CODE_BY_ERROR[error_type]
    return CODE_BY_ERROR[InternalError]


def to_status(error: SluiceError, *, request_id: str) -> status_pb2.Status:
    """The status a caller gets. The text of an internal error stays behind; `request_id` finds it in the log."""
    code = status_code(error)
    is_internal = code == code_pb2.INTERNAL
    status = status_pb2.Status(code=code, message=_INTERNAL_TEXT if is_internal else _shorten(error.message))
    for detail in _details(error, is_internal=is_internal, request_id=request_id):
        status.details.add().Pack(detail)
    return status


def to_grpc_status(error: SluiceError, *, request_id: str) -> grpc.Status:
    """As `to_status`, in the form `context.abort_with_status` takes."""
    return rpc_status.to_status(to_status(error, request_id=request_id))


def _details(error: SluiceError, *, is_internal: bool, request_id: str) -> list[Message]:
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=error.metadata)
    ]
    if isinstance(error, InvalidArgumentError):
        details.append(
            error_details_pb2.BadRequest(
                field_violations=[
                    error_details_pb2.BadRequest.FieldViolation(
                        field=violation.field, description=_shorten(violation.description)
                    )
                    for violation in error.violations
                ]
            )
        )
    if isinstance(error, QuotaExceededError):
        violation = error_details_pb2.QuotaFailure.Violation(subject=error.subject, description=_shorten(error.message))
        details.append(error_details_pb2.QuotaFailure(violations=[violation]))
    if isinstance(error, RetryableError):
        delay = Duration()
        delay.FromTimedelta(error.retry_after)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if is_internal:
        details.append(error_details_pb2.RequestInfo(request_id=request_id))
    return details


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 1] + "…"


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcFailure:
    """What a failed call said. `reason` is empty when the peer sent no ErrorInfo (gRPC's own errors)."""

    code: grpc.StatusCode
    message: str
    reason: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    violations: tuple[FieldViolation, ...] = ()
    quota_subject: str = ""
    retry_after: timedelta | None = None
    request_id: str = ""


def parse_rpc_error(error: grpc.RpcError) -> RpcFailure:
    """The details of a failed call; an error without rich status, or with a broken one, keeps its code and text."""
    try:
        status = rpc_status.from_call(cast("grpc.Call", error))
    except ValueError:
        status = None
    if status is None:
        return RpcFailure(code=error.code(), message=error.details() or "")
    return failure_from_status(status, code=error.code())


def failure_from_status(status: status_pb2.Status, *, code: grpc.StatusCode) -> RpcFailure:
    """The known details of a rich status; unknown ones are left out."""
    info = _detail(status, error_details_pb2.ErrorInfo)
    bad_request = _detail(status, error_details_pb2.BadRequest)
    retry = _detail(status, error_details_pb2.RetryInfo)
    quota = _detail(status, error_details_pb2.QuotaFailure)
    request = _detail(status, error_details_pb2.RequestInfo)
    return RpcFailure(
        code=code,
        message=status.message,
        reason=info.reason if info else "",
        metadata=dict(info.metadata) if info else {},
        violations=tuple(
            FieldViolation(field=violation.field, description=violation.description)
            for violation in (bad_request.field_violations if bad_request else ())
        ),
        quota_subject=quota.violations[0].subject if quota and quota.violations else "",
        retry_after=retry.retry_delay.ToTimedelta() if retry else None,
        request_id=request.request_id if request else "",
    )


DetailT = TypeVar("DetailT", bound=Message)


def _detail(status: status_pb2.Status, detail_type: type[DetailT]) -> DetailT | None:
    for packed in status.details:
        detail = detail_type()
        if packed.Unpack(detail):
            return detail
    return None


def to_error(failure: RpcFailure) -> SluiceError:
    """The typed error behind a peer's failure, so that a service can pass it on.

    gRPC's own errors carry no ErrorInfo: a peer that is away, was stopped or did not answer in time is UNAVAILABLE, all
    else is a bug of ours.
    """
    if not failure.reason:
        transient = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
        text = f"{failure.code.name}: {failure.message}"
        return UnavailableError(text) if failure.code in transient else InternalError(text)
    error_type = _ERROR_BY_CODE.get(failure.code.value[0], InternalError)
    return _BUILDERS.get(error_type, _build_plain(error_type))(failure)


def _build_plain(error_type: type[SluiceError]) -> Callable[[RpcFailure], SluiceError]:
    return lambda failure: error_type(failure.message, reason=failure.reason, metadata=failure.metadata)


def _build_invalid_argument(failure: RpcFailure) -> SluiceError:
    first, *more = failure.violations or (FieldViolation(field="", description=failure.message),)
    return InvalidArgumentError(
        first.field, first.description, reason=failure.reason, metadata=failure.metadata, more=more
    )


def _build_quota_exceeded(failure: RpcFailure) -> SluiceError:
    return QuotaExceededError(
        failure.message,
        subject=failure.quota_subject,
        reason=failure.reason,
        retry_after=failure.retry_after or DEFAULT_RETRY_AFTER,
        metadata=failure.metadata,
    )


def _build_unavailable(failure: RpcFailure) -> SluiceError:
    return UnavailableError(
        failure.message,
        reason=failure.reason,
        retry_after=failure.retry_after or DEFAULT_RETRY_AFTER,
        metadata=failure.metadata,
    )


_BUILDERS: Mapping[type[SluiceError], Callable[[RpcFailure], SluiceError]] = {
    InvalidArgumentError: _build_invalid_argument,
    QuotaExceededError: _build_quota_exceeded,
    UnavailableError: _build_unavailable,
}
